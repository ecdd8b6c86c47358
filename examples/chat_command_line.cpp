// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "chat_command_line.hpp"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "model_command_line.hpp"

chat_arguments parse_command_line(int argc, char** argv) {
  chat_arguments args;
  CLI::App app(
      "A conversation with a Gemma 4 model, line by line. Without --target: a tiny model trained on the King James Bible, which answers\n"
      "everything in its tone.");
  app.footer("Commands in the conversation: /stats, /reset, /help, /quit. Ctrl-C stops an answer; at the prompt it ends the program.");
  add_model_options(app, args);
  app.add_option("--system", args.system, "What the model is told before the conversation");
  app.add_flag("--think", args.think, "Let the model think before it answers; thoughts are shown dimmed on a terminal, and nowhere else");
  app.add_flag("--verbose", args.verbose, "After every answer, say on standard error what was processed");
  try {
    app.parse(argc, argv);
    settle_model_options(app, args);
    if (args.assistant.empty() && args.draft.value_or(0) > 0) throw CLI::ValidationError("--draft", "drafts need an --assistant");
  } catch (const CLI::ParseError& wrong) {
    std::exit(app.exit(wrong) == 0 ? 0 : 2);
  }
  return args;
}
