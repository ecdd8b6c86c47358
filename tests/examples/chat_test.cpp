// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "program.hpp"

namespace {

using outrider::testing::outcome;
using outrider::testing::temporary_directory;

const std::string root = OUTRIDER_SOURCE_DIR, tiny = root + "/examples/data/tiny-kjv";

outcome chat(const std::string& arguments, std::string_view input = {}) {
  return outrider::testing::run_program(OUTRIDER_CHAT, arguments, input);
}
bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

/// The numbers of the line that contains `part`, in order.
std::vector<std::size_t> numbers_of(const std::string& text, std::string_view part) {
  std::istringstream lines(text);
  std::vector<std::size_t> numbers;
  for (std::string line; std::getline(lines, line);) {
    if (!has(line, part)) continue;
    for (std::size_t i = 0; i < line.size();) {
      if (line[i] < '0' || line[i] > '9') {
        ++i;
        continue;
      }
      std::size_t length = 0;
      numbers.push_back(std::stoul(line.substr(i), &length));
      i += length;
    }
  }
  return numbers;
}
/// "prompt tokens: 37 prefilled, 56 reused; of the last turn: 20 prefilled, 56 reused"
struct prompt_counts {
  std::size_t prefilled = 0, reused = 0, last_prefilled = 0, last_reused = 0;
};
prompt_counts counts_in(const std::string& out) {
  const auto n = numbers_of(out, "prompt tokens:");
  CAPTURE(out);
  REQUIRE(n.size() == 4);
  return {n[0], n[1], n[2], n[3]};
}

void check_refused(const outcome& run, int code, const std::string& mention) {
  CAPTURE(run.err);
  CHECK(run.code == code);
  CHECK(run.out.empty());
  CHECK(has(run.err, mention));
  CHECK_FALSE(has(run.err, "terminate called"));
}

/// The program with both ends in our hands.
class running_chat {
 public:
  explicit running_chat(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), OUTRIDER_CHAT);
    std::array<int, 2> to{}, from{};
    REQUIRE(::pipe(to.data()) == 0);
    REQUIRE(::pipe(from.data()) == 0);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    process_ = ::fork();
    REQUIRE(process_ >= 0);
    if (process_ == 0) {
      ::dup2(to[0], STDIN_FILENO);
      ::dup2(from[1], STDOUT_FILENO);
      ::dup2(::open("/dev/null", O_WRONLY), STDERR_FILENO);
      for (const int end : {to[0], to[1], from[0], from[1]}) ::close(end);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(to[0]);
    ::close(from[1]);
    in_ = to[1];
    out_ = from[0];
  }
  running_chat(const running_chat&) = delete;
  running_chat& operator=(const running_chat&) = delete;
  ~running_chat() {
    if (process_ > 0) {
      ::kill(process_, SIGKILL);
      ::waitpid(process_, nullptr, 0);
    }
    ::close(in_);
    ::close(out_);
  }

  void write(std::string_view text) { REQUIRE(::write(in_, text.data(), text.size()) == static_cast<ssize_t>(text.size())); }
  void interrupt() { ::kill(process_, SIGINT); }
  /// Reads until the program has written `part`; false if it ends before.
  bool read_until(std::string_view part) {
    while (!has(out, part))
      if (!read_more()) return false;
    return true;
  }
  /// Reads what comes next; false at the end.
  bool read_more() {
    std::array<char, 4096> bytes;
    const auto count = ::read(out_, bytes.data(), bytes.size());
    if (count > 0) out.append(bytes.data(), static_cast<std::size_t>(count));
    return count > 0;
  }
  /// Reads nothing until what it wrote fills the pipe but for a page, or it ends.
  void fill() const {
    const int most = ::fcntl(out_, F_GETPIPE_SZ) - 4096;
    pollfd watched{out_, POLLIN, 0};
    for (int waiting = 0; waiting < most && (watched.revents & POLLHUP) == 0;) {
      ::poll(&watched, 1, 10);
      REQUIRE(::ioctl(out_, FIONREAD, &waiting) == 0);
    }
  }
  /// Whether it wrote or ended within a tenth of a second.
  [[nodiscard]] bool stirs() const {
    pollfd watched{out_, POLLIN, 0};
    return ::poll(&watched, 1, 100) > 0;
  }
  /// Reads to the end and returns the exit code.
  int finish() {
    while (read_more()) {
    }
    int status = 0;
    REQUIRE(::waitpid(process_, &status, 0) == process_);
    process_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::string out;  // so far

 private:
  pid_t process_ = 0;
  int in_ = -1, out_ = -1;
};

const std::string two_turns = "And God said unto Moses\nWhat is the law?\n";

}  // namespace

TEST_CASE("two turns through a pipe are answered, and the second one reuses what the first one left") {
  const outcome run = chat("--max-new-tokens 24 --draft 4", two_turns + "/stats\n");
  CHECK(run.code == 0);
  CHECK_FALSE(has(run.out, "> "));  // the prompt is for terminals
  CHECK(has(run.out, "2 turns"));
  const prompt_counts counts = counts_in(run.out);
  CHECK(counts.last_reused >= 17 + 20);  // the first prompt and most of its answer
  CHECK(counts.reused == counts.last_reused);
  CHECK(counts.prefilled == 17 + counts.last_prefilled);
  CHECK(numbers_of(run.out, "tokens written")[0] == 2 * 24);
  CHECK(numbers_of(run.out, "tokens written")[2] > 0);  // drafts happened
}

TEST_CASE("pitfall 102: an answer on reused tokens is the answer of a program that processes all of them") {
  // The first answer is part of the second prompt; with drafts, without, and on the reference all three programs write the same.
  const outcome drafted = chat("--max-new-tokens 24", two_turns);
  CHECK(drafted.out == chat("--max-new-tokens 24 --draft 0", two_turns).out);
  CHECK(drafted.out == chat("--max-new-tokens 24 --draft 2 --threads 1 --backend highway", two_turns).out);
}

TEST_CASE("/reset begins anew") {
  const outcome run = chat("--max-new-tokens 8", "And God said\n/reset\n/stats\nAnd God said\n/stats\n");
  CHECK(run.code == 0);
  const std::size_t first = run.out.find('\n');
  const std::string answer = run.out.substr(0, first + 1);
  CHECK(has(run.out, "0 turns, 0 of"));
  CHECK(has(run.out.substr(first + 1), "\n" + answer + "1 turns"));
}

TEST_CASE("--verbose says after every answer what was processed, on standard error") {
  const outcome run = chat("--max-new-tokens 8 --verbose", two_turns);
  CHECK(numbers_of(run.err, "prompt tokens:").size() == 2 * 5);
  CHECK_FALSE(has(run.out, "prefilled"));
}

TEST_CASE("a system message stands before the conversation, and is there again after /reset") {
  const outcome with = chat("--max-new-tokens 1 --system 'Thou art a prophet.'", "Speak\n/stats\n/reset\nSpeak\n/stats\n"),
                without = chat("--max-new-tokens 1", "Speak\n/stats\n");
  const auto n = numbers_of(with.out, "prompt tokens:");
  REQUIRE(n.size() == 8);
  CHECK(n[0] > counts_in(without.out).prefilled + 5);
  CHECK(n[4] == n[0]);
}

TEST_CASE("empty lines are no turns, lines may end as on Windows, the last one needs no end, and /quit ends") {
  const outcome plain = chat("--max-new-tokens 4", "Speak\n/stats\n");
  CHECK(chat("--max-new-tokens 4", "\n  \nSpeak\r\n\n/stats\r\n").out.substr(0, 40) == plain.out.substr(0, 40));
  CHECK(has(chat("--max-new-tokens 4", "Speak\n/stats").out, "1 turns"));
  const outcome quit = chat("--max-new-tokens 4", "/quit\nSpeak\n");
  CHECK(quit.code == 0);
  CHECK(quit.out.empty());
  CHECK(chat("").code == 0);
}

TEST_CASE("input that cannot be read is an error, not an end") {
  check_refused(outrider::testing::run_program("/bin/sh", "-c '" OUTRIDER_CHAT " </'"), 1, "standard input cannot be read: Is a directory");
}

TEST_CASE("a closed standard input is an end") { CHECK(outrider::testing::run_program("/bin/sh", "-c '" OUTRIDER_CHAT " <&-'").code == 0); }

TEST_CASE("spaces around a command do not matter") {
  const outcome run = chat("--max-new-tokens 4", " /stats\t\n/reset \n");
  CHECK(has(run.out, "0 turns"));
  CHECK(run.err.empty());
}

TEST_CASE("an unknown command is one sentence, and the conversation goes on") {
  const outcome run = chat("--max-new-tokens 4", "/frobnicate\n/stats\n");
  CHECK(run.code == 0);
  CHECK(has(run.err, "'/frobnicate'"));
  CHECK(has(run.err, "/help"));
  CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
  CHECK(has(run.out, "0 turns"));
}

TEST_CASE("/help lists the commands, --help the options") {
  const outcome commands = chat("", "/help\n"), options = chat("--help");
  for (const char* command : {"/stats", "/reset", "/help", "/quit", "Ctrl-C"}) {
    CHECK_MESSAGE(has(commands.out, command), command);
    CHECK_MESSAGE(has(options.out, command), command);
  }
  CHECK(options.code == 0);
  for (const char* option :
       {"--target", "--assistant", "--system", "--think", "--max-new-tokens", "--draft", "--threads", "--backend", "--kv", "--verbose"})
    CHECK_MESSAGE(has(options.out, option), option);
}

TEST_CASE("an answer that is cut says so") { CHECK(has(chat("--max-new-tokens 4", "Speak\n").err, "cut after 4 tokens")); }

TEST_CASE("a line longer than the context is left out, and the conversation goes on") {
  const outcome run = chat("--max-new-tokens 4", std::string(5000, '7') + "\n/stats\nSpeak\n/stats\n");
  CHECK(run.code == 0);
  CHECK(has(run.err, "the model's context is 1024"));
  CHECK(has(run.err, "/reset"));
  CHECK(has(run.out, "0 turns"));
  CHECK(has(run.out, "1 turns"));
}

TEST_CASE("an answer that fills the context says so, and /reset helps") {
  const outcome run = chat("--max-new-tokens 5000 --threads 1", std::string(600, '7') + "\n/stats\nSpeak\n/reset\nSpeak\n/stats\n");
  CHECK(run.code == 0);
  CHECK(has(run.err, "context is full"));
  CHECK(has(run.out, "1024 of 1024"));
}

TEST_CASE("a target and an assistant in GGUF files talk as those in directories") {
  const std::string from_directory = chat("--max-new-tokens 12", two_turns).out;
  CHECK(chat("--max-new-tokens 12 --target " + tiny + "/gguf/target-bf16.gguf --assistant " + tiny + "/gguf/assistant-bf16.gguf", two_turns)
            .out == from_directory);
  CHECK(chat("--max-new-tokens 12 --kv bf16 --target " + tiny + "/gguf/target-q4_0.gguf --assistant " + tiny + "/assistant", two_turns)
            .code == 0);
}

TEST_CASE("Ctrl-C stops an answer and not the program") {
  // The reference takes seconds for so long an answer.
  running_chat program({"--backend", "reference", "--draft", "0", "--max-new-tokens", "900"});
  program.write("And it came to pass\n");
  REQUIRE(program.read_until(" "));
  program.interrupt();
  program.write("/stats\n");
  REQUIRE(program.read_until("tokens written"));
  const auto written = numbers_of(program.out, "tokens written");
  CHECK(written[0] > 0);
  CHECK(written[0] < 900);
  CHECK(has(program.out, "1 turns"));
  program.write("/help\nAnd then\n");  // the conversation goes on
  REQUIRE(program.read_until("stops the answer.\n"));
  REQUIRE(program.read_more());
  program.interrupt();
  program.write("/stats\n/quit\n");
  CHECK(program.finish() == 0);
  CHECK(has(program.out, "2 turns"));
}

TEST_CASE("Ctrl-C while a slow reader keeps the program waiting loses nothing of what it writes") {
  running_chat program({});
  constexpr std::size_t commands = 1000;
  std::string input;
  for (std::size_t i = 0; i < commands; ++i) input += "/help\n";
  program.write(input + "/quit\n");
  program.fill();
  program.interrupt();
  CHECK(program.finish() == 0);
  std::size_t answers = 0;
  for (std::size_t at = 0; (at = program.out.find("/help    this list\n", at)) != std::string::npos; ++at) ++answers;
  CHECK(answers == commands);
}

TEST_CASE("Ctrl-C at the prompt ends the program") {
  running_chat program({"--max-new-tokens", "4"});
  program.write("/stats\n");
  REQUIRE(program.read_until("tokens written"));
  do program.interrupt();  // one that comes before the program waits again counts for what it did before
  while (!program.stirs());
  CHECK(program.finish() == 0);
}

TEST_CASE("wrong usage is exit code 2") {
  check_refused(chat("--nonsense"), 2, "--nonsense");
  check_refused(chat("--draft 17"), 2, "--draft");
  check_refused(chat("--kv q4_0"), 2, "--kv");
  check_refused(chat("--max-new-tokens x"), 2, "--max-new-tokens");
  check_refused(chat("--target " + tiny + "/target --draft 4"), 2, "--assistant");
}

TEST_CASE("a model that cannot talk is refused with one sentence") {
  check_refused(chat("--target /no/such/model"), 1, "/no/such/model");
  check_refused(chat("--target " + tiny + "/assistant"), 1, "assistant");
  check_refused(chat("--target " + tiny + "/target --assistant " + tiny + "/target"), 1, "target");
  check_refused(chat("--think"), 1, "--think");
}

TEST_CASE("a vocabulary without turns is refused") {
  const temporary_directory directory;
  for (const char* file : {"config.json", "generation_config.json", "model.safetensors"})
    std::filesystem::create_symlink(tiny + "/target/" + file, directory.path() / file);
  std::ifstream original(tiny + "/target/tokenizer.json", std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(original), {}};
  for (std::size_t at; (at = text.find("<|turn>")) != text.npos;) text.replace(at, 7, "<|torn>");
  directory.write("tokenizer.json", text);
  check_refused(chat("--target '" + directory.path().string() + "'"), 1, "not made for conversations");
}

TEST_CASE("a template of another family is noticed") {
  const temporary_directory directory;
  for (const char* file : {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"})
    std::filesystem::create_symlink(tiny + "/target/" + file, directory.path() / file);
  directory.write("chat_template.jinja", "<start_of_turn>{{ messages }}");
  CHECK(has(chat("--target '" + directory.path().string() + "'").err, "none of Gemma 4"));
  directory.write("chat_template.jinja", "<|turn>{{ messages }}<turn|>");
  CHECK(chat("--target '" + directory.path().string() + "'").err.empty());
}
