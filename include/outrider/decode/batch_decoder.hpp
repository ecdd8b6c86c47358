// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/decode/drafter.hpp"
#include "outrider/decode/generate.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/batch.hpp"

namespace outrider {

/// One text that a batch shall write.
struct batch_request {
  std::vector<token_id> prompt;
  generate_options options = {};
  sampling_options sampling = {};
  std::optional<std::size_t> prefix = {};  // a slot of the batch whose committed tokens the prompt goes on behind; see submit()
  std::function<std::optional<finish_reason>(token_id)> on_token = {};  // every token as it is chosen; why to stop, or nothing
  std::function<void(const generation&)> on_finish = {};
};

/// Writes many texts at once, each with its own prompt, drafts, sampling, limits and callbacks: continuous batching. A step is one pass of the
/// model for all of them, so that its weights are read once for many rows; texts join and leave between steps.
///
///     batch_decoder decoder(batch, drafter);
///     decoder.submit({...});              any number, at any time, from callbacks too
///     while (decoder.step()) {}
///
/// A text's slot is closed when it ends: what goes on is another request (for which a prefix may be kept). generation::kept is all its tokens.
/// The tokens of each text are those that generate() writes with the same prompt and options alone, bit for bit (with row-exact prompts, see
/// gemma4::batch). Order: texts begin in the order of submission, as slots are free; in a pass each gets its rows in turn, a chunk of a prompt
/// or a token with its drafts, and who found no room in one pass comes first in the next. Memory: that of the batch's slots and of the requests
/// that wait, of which there are at most max_waiting.
/// Borrows batch and drafter; one thread at a time, but for options.cancel.
template <class Batch, class Drafter = no_draft, draft_length_policy Length = adaptive>
class batch_decoder {
  using B = typename Batch::backend_type;
  using target = decltype(std::declval<const Batch&>().target(0));
  static_assert(check_drafter<Drafter, target>());

 public:
  using request_id = std::uint64_t;

  /// Every text gets a copy of `length`. Where several texts share a pass its time says nothing of one of them, so that policies keep the
  /// costs they were given: see calibrate(). Errors: argument_invalid if max_waiting is 0, pair_mismatch if the drafter was made for another
  /// model.
  batch_decoder(Batch& batch, Drafter& drafter, Length length = Length(), std::size_t max_waiting = 4096)
      : batch_(&batch), drafter_(&drafter), length_(std::move(length)), max_waiting_(max_waiting) {
    if (max_waiting == 0) throw error(error_code::argument_invalid, "outrider: a queue for 0 requests takes none; at least 1 is needed");
    if constexpr (requires(const target& view) { drafter.check(view); }) drafter.check(target(batch, 0));
    texts_.reserve(batch.max_sequences());
    entries_.reserve(batch.max_sequences());
    rows_of_.reserve(batch.max_sequences());
  }
  batch_decoder(const batch_decoder&) = delete;
  batch_decoder& operator=(const batch_decoder&) = delete;
  /// Texts that are not finished are dropped without a word.
  ~batch_decoder() {
    for (const auto& text : texts_)
      if (batch_->is_open(text->slot)) batch_->close(text->slot);
  }

  /// Puts a text at the end of the queue. A prefix must stay as it is until the text has begun; afterwards it may change or be closed. Limits
  /// of time count from then too. Errors: those of generate(), and of speculative_decoder::generate() for drafts; argument_invalid for
  /// sampling that is not allowed, for a prefix that is no open slot, and if max_waiting requests wait.
  request_id submit(batch_request request) {
    if (waiting_.size() >= max_waiting_)
      throw error(error_code::argument_invalid, "outrider: " + std::to_string(waiting_.size()) + " requests wait, the queue takes no more");
    check(request.sampling);
    if (request.prefix && !batch_->is_open(*request.prefix))
      throw error(error_code::argument_invalid, "outrider: slot " + std::to_string(*request.prefix) + " holds no sequence to go on behind");
    detail::check_request(*batch_, request.prefix ? batch_->committed(*request.prefix) : 0, request.prompt, request.options);
    detail::most_drafts(*batch_, request.options);
    std::vector<token_id> prefix;
    if (request.prefix) prefix.assign(batch_->tokens(*request.prefix).begin(), batch_->tokens(*request.prefix).end());
    waiting_.push_back({next_id_, std::move(request), std::move(prefix)});
    return next_id_++;
  }

  /// Ends a text as cancelled, between two steps or from a callback: on_token is not called again, and on_finish hears of it within the next step. False if there is none of this
  /// id that has not ended.
  bool cancel(request_id id) {
    for (const auto& text : texts_)
      if (text->id == id && !text->is_done) return text->is_cancelled = true;
    for (auto& waiter : waiting_)
      if (waiter.id == id) return waiter.is_cancelled = true;
    return false;
  }

  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }
  [[nodiscard]] std::size_t running() const noexcept { return texts_.size(); }

  /// One pass over as many texts as have room in it. False if nothing is left to do. What a callback or the drafter throws ends the text it is
  /// about, and is thrown on when the step is complete; of several the first. Errors: out_of_memory, which ends the texts that met it;
  /// argument_invalid if a text's prefix is no longer what it was, which ends that text, and if texts wait, none runs and no slot is free.
  bool step() {
    failure_ = nullptr;
    admit();
    drop_interrupted();
    gather();
    if (!entries_.empty()) pass();
    std::rotate(texts_.begin(), texts_.begin() + static_cast<std::ptrdiff_t>(served_), texts_.end());  // who got nothing comes first
    std::erase_if(texts_, [&](const auto& text) { return text->is_done; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return !texts_.empty() || !waiting_.empty();
  }

 private:
  using emit = std::function<std::optional<finish_reason>(token_id)>;

  struct waiting_text {
    request_id id;
    batch_request request;
    std::vector<token_id> prefix;  // what the slot of that name held when it was submitted
    bool is_cancelled = false;
  };
  struct running_text {
    request_id id;
    batch_request request;
    std::size_t slot;
    sampling sampler;
    Length length;
    detail::text_in_progress<emit> text;
    std::size_t prompt_left;  // tokens of the prompt not processed yet
    round_record record = {};
    detail::round_buffers buffers = {};
    double pass_seconds = 0;
    bool is_drafted = false;  // the round's drafts are made, its pass was full
    bool is_cancelled = false, is_done = false;

    running_text(request_id id_, batch_request request_, std::size_t slot_, const Length& length_, const Batch& batch)
        : id(id_),
          request(std::move(request_)),
          slot(slot_),
          sampler(request.sampling),
          length(length_),
          text(batch.tokens(slot), request.prompt, batch.max_positions(), request.options, request.on_token),
          prompt_left(request.prompt.size()) {}
  };

  /// Opens slots for those who wait, after sorting out who does not want to any more.
  void admit() {
    for (std::size_t i = 0; i < waiting_.size();) {
      if (!waiting_[i].is_cancelled && !waiting_[i].request.options.cancel.stop_requested()) {
        ++i;
        continue;
      }
      const waiting_text gone = std::move(waiting_[i]);
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
      report_unborn(gone.request);
    }
    while (!waiting_.empty() && batch_->size() < batch_->max_sequences()) {
      waiting_text next = std::move(waiting_.front());
      waiting_.pop_front();
      if (!next.request.on_token) next.request.on_token = [](token_id) { return std::nullopt; };
      std::optional<std::size_t> slot;
      try {
        slot = slot_for(next);
        auto text = std::make_unique<running_text>(next.id, next.request, *slot, length_, *batch_);
        batch_->reserve(*slot, text->text.most_positions());
        if constexpr (requires { drafter_->reserve(std::size_t{}); }) drafter_->reserve(text->text.most_positions());
        texts_.push_back(std::move(text));
      } catch (...) {
        remember_failure();
        if (slot) batch_->close(*slot);
        report_unborn(next.request);
      }
    }
    if (texts_.empty() && !waiting_.empty() && !failure_)
      failure_ = std::make_exception_ptr(
          error(error_code::argument_invalid, "outrider: " + std::to_string(waiting_.size()) + " texts wait, none runs, and all " +
                                                  std::to_string(batch_->max_sequences()) + " slots of the batch are held by others"));
  }
  std::size_t slot_for(const waiting_text& next) {
    if (!next.request.prefix) return batch_->add();
    const std::size_t prefix = *next.request.prefix;
    if (!batch_->is_open(prefix) || !std::ranges::equal(batch_->tokens(prefix), next.prefix))
      throw error(error_code::argument_invalid, "outrider: slot " + std::to_string(prefix) + " no longer holds the " +
                                                    std::to_string(next.prefix.size()) + " tokens it held when a text was to go on behind");
    return batch_->fork(prefix);
  }
  /// A text that ends before it began.
  void report_unborn(const batch_request& request) {
    generation nothing;
    nothing.finish = finish_reason::cancelled;
    report(request, nothing);
  }

  /// The pass over what was gathered.
  void pass() {
    for (running_text* t : rows_of_) t->pass_seconds = t->text.now();
    try {
      batch_->forward(entries_);
      // What went wrong on a device went wrong for all of them.
      if constexpr (requires { batch_->context().wait(); }) batch_->context().wait();
    } catch (...) {
      for (running_text* t : rows_of_) fail(*t);
      return;
    }
    for (running_text* t : rows_of_) t->pass_seconds = t->text.now() - t->pass_seconds;
    for (std::size_t i = 0; i < entries_.size(); ++i) advance(*rows_of_[i], i);
  }

  void drop_interrupted() {
    for (const auto& text : texts_) {
      if (text->is_cancelled) text->text.finish(finish_reason::cancelled);
      if (!batch_->is_open(text->slot)) text->text.finish(finish_reason::caller);  // closed by the program
      const bool goes_on = !text->is_cancelled && batch_->is_open(text->slot) &&
                           (text->prompt_left != 0 ? text->text.nobody_interrupts() : text->text.may_go_on(batch_->committed(text->slot)));
      if (!goes_on) end(*text);
    }
    std::erase_if(texts_, [](const auto& text) { return text->is_done; });
  }

  /// The rows of the next pass, in turn from where the last one had no more room.
  void gather() {
    entries_.clear();
    rows_of_.clear();
    served_ = 0;
    std::size_t room = batch_->max_rows();
    while (served_ < texts_.size()) {
      running_text& t = *texts_[served_];
      try {
        if (!add_rows(t, room)) break;
      } catch (...) {  // of the drafter
        fail(t);
      }
      ++served_;
    }
  }

  /// False if the text's rows do not fit. Neither a chunk nor a round is ever cut.
  bool add_rows(running_text& t, std::size_t& room) {
    std::span<const token_id> tokens;
    if (t.prompt_left != 0) {
      const std::size_t count = (std::min)(t.prompt_left, batch_->prompt_chunk());
      tokens = std::span<const token_id>(t.request.prompt).last(t.prompt_left).first(count);
    } else {
      if (!t.is_drafted) draft(t);
      tokens = std::span<const token_id>(t.buffers.rows).first(t.record.drafted + 1);
    }
    if (tokens.size() > room) return false;
    room -= tokens.size();
    const bool is_prompt = t.prompt_left != 0;
    const std::size_t wanted = !is_prompt ? tokens.size() : tokens.size() == t.prompt_left ? 1 : 0;
    entries_.push_back({t.slot, tokens, wanted, is_prompt});
    rows_of_.push_back(&t);
    return true;
  }

  void draft(running_text& t) {
    const target view = batch_->target(t.slot);
    const std::size_t most =
        (std::min)({detail::most_drafts(*batch_, t.request.options), t.text.left() - 1, batch_->max_positions() - t.text.tokens().size()});
    const draft_plan plan = t.length.plan(most);
    t.record = detail::draft_round(view, *drafter_, t.sampler, plan, (std::min)(plan.drafts, most), t.text, t.buffers);
    t.is_drafted = true;
  }

  /// What the pass means for one text.
  void advance(running_text& t, std::size_t entry) {
    try {
      if (t.is_cancelled) {  // by a callback of this very step
        t.text.finish(finish_reason::cancelled);
        end(t);
      } else if (t.prompt_left != 0) {
        advance_prompt(t, entry);
      } else {
        advance_round(t, entry);
      }
    } catch (...) {
      fail(t);
    }
  }
  void advance_prompt(running_text& t, std::size_t entry) {
    const std::size_t count = entries_[entry].tokens.size();
    batch_->commit(t.slot, count);
    t.prompt_left -= count;
    if (t.prompt_left != 0) return;
    token_id first = 0;
    detail::choose<B>(batch_->context(), batch_->logits(entry), t.request.options.suppress, t.sampler, t.text.tokens(), {&first, 1});
    t.text.prompt_is_done();
    if (t.request.options.max_new_tokens == 0 || !t.text.push(first)) end(t);
  }
  void advance_round(running_text& t, std::size_t entry) {
    t.is_drafted = false;
    round_record& record = t.record;
    const double begin = t.text.now();
    record.accepted =
        detail::verify_round<B>(batch_->context(), batch_->logits(entry), *drafter_, t.sampler, t.text, record.drafted, t.buffers);
    record.verify_seconds = t.pass_seconds + (t.text.now() - begin);
    round_record heard = record;
    if (entries_.size() > 1) heard.verify_seconds = heard.draft_seconds = 0;
    t.length.record(heard);

    bool go_on = true;
    std::size_t kept = 0;
    while (go_on && kept <= record.accepted) {
      go_on = t.text.push(t.buffers.picks[kept++]);
      if (t.is_cancelled) go_on = t.text.finish(finish_reason::cancelled);
    }
    batch_->commit(t.slot, kept);
    record.accepted = (std::min)(record.accepted, kept);
    record.emitted = kept;
    t.text.count_pass(record);
    if (!go_on) end(t);
  }

  /// Ends a text because of the exception at work.
  void fail(running_text& t) {
    remember_failure();
    t.text.finish(finish_reason::caller);
    end(t);
  }
  void end(running_text& t) {
    if (std::exchange(t.is_done, true)) return;
    const generation result = t.text.settle(*batch_);
    if (batch_->is_open(t.slot)) batch_->close(t.slot);
    report(t.request, result);
  }
  void report(const batch_request& request, const generation& result) {
    try {
      if (request.on_finish) request.on_finish(result);
    } catch (...) {
      remember_failure();
    }
  }
  void remember_failure() noexcept {
    if (!failure_) failure_ = std::current_exception();
  }

  Batch* batch_;
  Drafter* drafter_;
  Length length_;
  std::size_t max_waiting_;
  std::size_t served_ = 0;  // texts, from the first on, that found room in this pass
  request_id next_id_ = 1;
  std::deque<waiting_text> waiting_;
  std::vector<std::unique_ptr<running_text>> texts_;  // texts_ and waiting_ may grow from a callback, so nothing holds iterators across one
  std::vector<gemma4::sequence_rows> entries_;
  std::vector<running_text*> rows_of_;  // by entry
  std::exception_ptr failure_;
};

}  // namespace outrider
