// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What chat.cpp does, on any backend: read a line, answer it.
#pragma once
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "chat_command_line.hpp"
#include "chat_console.hpp"
#include "chat_conversation.hpp"

inline constexpr const char* help =
    "/stats   what the conversation took so far\n"
    "/reset   begin anew\n"
    "/help    this list\n"
    "/quit    end; so do Ctrl-D, and Ctrl-C at the prompt\n"
    "Ctrl-C during an answer stops the answer.\n";

inline void flush() {
  if (!std::cout.flush()) throw std::runtime_error("standard output cannot be written");
}

inline std::string_view trimmed(std::string_view line) {
  constexpr const char* spaces = " \t";
  const std::size_t begin = line.find_first_not_of(spaces);
  return begin == line.npos ? "" : line.substr(begin, line.find_last_not_of(spaces) - begin + 1);
}

/// Shows an answer as it comes. Thoughts are for people at a terminal.
class answer_printer {
 public:
  explicit answer_printer(bool is_terminal) : is_terminal_(is_terminal) {}

  void show(const outrider::chat_parser::delta& d) {
    if (is_terminal_ && !d.thought.empty()) {
      if (!is_dimmed_) std::cout << "\033[2m";
      is_dimmed_ = true;
      std::cout << d.thought;
    }
    if (!d.answer.empty()) {
      undim();
      std::cout << d.answer;
    }
    if (d.call) {
      undim();
      if (d.call->is_valid)
        std::cout << "\n[calls " << d.call->name << " with "
                  << d.call->arguments.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "]\n";
      else
        std::cout << "\n[not a tool call: " << d.call->text << "]\n";
    }
    flush();
  }
  void finish() {
    undim();
    std::cout << '\n';
    flush();
  }

 private:
  void undim() {
    if (is_dimmed_) std::cout << "\033[0m\n";
    is_dimmed_ = false;
  }
  bool is_terminal_, is_dimmed_ = false;
};

template <class Chat>
void print_stats(const Chat& chat) {
  const chat_work &last = chat.last(), &total = chat.total();
  std::printf("%zu turns, %zu of %zu positions in the cache\n", chat.turns(), chat.committed(), chat.max_positions());
  std::printf("prompt tokens: %zu prefilled, %zu reused; of the last turn: %zu prefilled, %zu reused\n", total.prefilled, total.reused,
              last.prefilled, last.reused);
  std::printf("%zu tokens written, %.0f tokens/s; %zu drafted, %zu accepted\n", total.written,
              total.seconds > 0 ? static_cast<double>(total.written) / total.seconds : 0, total.drafted, total.accepted);
  if (std::fflush(stdout) != 0) throw std::runtime_error("standard output cannot be written");
}

template <class Backend, class Kv>
void run(const chat_arguments& args) {
  using outrider::finish_reason;
  conversation<Backend, Kv> chat(args);
  const bool is_terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
  if (chat.is_unknown_template()) std::cerr << "chat: the model's chat template is none of Gemma 4; the newest Gemma 4 form is used\n";
  if (is_terminal) std::cout << "Type a line, or /help.\n";

  interrupt_watch interrupts;
  line_reader input;
  for (;;) {
    if (is_terminal) std::cout << "> ";
    flush();
    const auto line = input.next(interrupts);
    const std::string_view command = line ? trimmed(*line) : "/quit";
    if (command == "/quit") {
      if (is_terminal && !line) std::cout << '\n';
      return flush();
    }
    if (command.empty()) continue;
    if (command == "/help") {
      std::cout << help;
    } else if (command == "/stats") {
      print_stats(chat);
    } else if (command == "/reset") {
      chat.reset();
    } else if (command.front() == '/') {
      std::cerr << "chat: there is no command '" << command << "'; /help lists what there is\n";
    } else {
      answer_printer printer(is_terminal);
      try {
        const finish_reason finish = chat.answer(
            *line, [&](const outrider::chat_parser::delta& d) { printer.show(d); }, [&] { return interrupts.pressed(); });
        printer.finish();
        if (finish == finish_reason::max_new_tokens)
          std::cerr << "chat: the answer was cut after " << args.max_new_tokens << " tokens; --max-new-tokens sets the limit\n";
        if (finish == finish_reason::context_full) std::cerr << "chat: the model's context is full; /reset begins anew\n";
        if (args.verbose)
          std::cerr << "chat: prompt tokens: " << chat.last().prefilled << " prefilled, " << chat.last().reused << " reused; "
                    << chat.last().written << " written, " << chat.last().drafted << " drafted, " << chat.last().accepted << " accepted\n";
      } catch (const outrider::error& problem) {
        if (problem.code() != outrider::error_code::context_full) throw;
        std::cerr << "chat: " << problem.what() << "; the line was left out, /reset begins anew\n";
      }
    }
  }
}

template <class Backend>
void run_on(const chat_arguments& args) {
  args.kv == "bf16"   ? run<Backend, outrider::bf16>(args)
  : args.kv == "f16"  ? run<Backend, outrider::f16>(args)
  : args.kv == "q8_0" ? run<Backend, outrider::q8_0>(args)
                      : run<Backend, float>(args);
}

/// In a file of its own, chat_cuda.cpp.
void run_on_cuda(const chat_arguments& args);
