// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What every pass did, as JSON lines: docs/trace.md.
#pragma once
#include <cstddef>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "outrider/decode/generate.hpp"
#include "outrider/version.hpp"

class trace_writer {
 public:
  /// Errors: std::runtime_error if the file cannot be written.
  explicit trace_writer(const std::string& file) : name_(file), out_(file) { check(); }

  /// A text begins; `facts` are what its first line says besides the versions.
  void begin(const nlohmann::ordered_json& facts) {
    nlohmann::ordered_json line{{"outrider_trace", 1}, {"outrider", OUTRIDER_VERSION}};
    line.update(facts);
    write(line);
    round_ = 0;
  }
  void pass(const outrider::round_record& record, const char* source) {
    nlohmann::ordered_json line{{"round", round_++},
                                {"position", record.position},
                                {"drafted", record.drafted},
                                {"accepted", record.accepted},
                                {"emitted", record.emitted}};
    if (record.drafted != 0) line["source"] = source;
    if (record.joint_drafts != 0) line["joint_drafts"] = record.joint_drafts;
    line["draft_seconds"] = record.draft_seconds;
    line["verify_seconds"] = record.verify_seconds;
    if (!record.confidence.empty()) line["confidence"] = record.confidence;
    write(line);
  }
  void end(const outrider::generation& result) {
    write({{"finish", name_of(result.finish)}, {"tokens", result.stats.tokens}, {"decode_seconds", result.stats.decode_seconds}});
    out_.flush();
    check();
  }

 private:
  void write(const nlohmann::ordered_json& line) { out_ << line.dump() << '\n'; }
  void check() const {
    if (!out_) throw std::runtime_error("'" + name_ + "': cannot be written");
  }
  std::string name_;
  std::ofstream out_;
  std::size_t round_ = 0;
};
