// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The target's pass against the recorded one, stage by stage.
//
// Pitfalls that a recorded stage settles without a test of their own:
//   26 plain norm weights, 27 attention scale and softcap, 28 rotation of full layers, 30 values of k_eq_v layers, 31 norm before the
//   residual, 36 GEGLU also in experts, 115 router, 116 gate rows first          `layer.0` … (`attention.i`, `router.i`)
//   32 layer_scalar once, after the per-layer inputs                             `layer.i`
//   34 embedding factor, 35 per-layer constants                                  `embed`, `ple`
//   37 double-wide MLP, 38 and 39 donors by attention kind                       `layer.i` of the sharing layers of e2b and e4b
//   46 window i − W < j <= i                                                     every `layer.i` of the long prompt, 23 > W
//   54 hidden states after the final norm                                        `hidden`
#pragma once
#include <map>

#include "golden_data.hpp"

namespace models {

/// An observer that keeps what it sees, under the names of the golden tensors.
struct stages_seen {
  std::map<std::string, std::vector<float>> rows;

  template <class View>
  void operator()(gemma4::stage stage, std::size_t layer, const View& view) {
    const std::string i = std::to_string(layer);
    switch (stage) {
      case gemma4::stage::embedding:
        rows["embed"] = copy_of(view);
        break;
      case gemma4::stage::per_layer_inputs:
        rows["ple"] = copy_of(view);
        break;
      case gemma4::stage::attention_output:
        rows["attention." + i] = copy_of(view);
        break;
      case gemma4::stage::experts:
        rows["router." + i + ".experts"] = copy_of(view);
        break;
      case gemma4::stage::expert_weights:
        rows["router." + i + ".weights"] = copy_of(view);
        break;
      case gemma4::stage::layer_output:
        rows["layer." + i] = copy_of(view);
        break;
    }
  }
};

TEST_CASE_TEMPLATE("every stage of a prompt's pass is the recorded one", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    context_of<B> ctx{one_thread};
    const auto target = gemma4::load_model<B>(expected.directory / "target");
    const gemma4::text_config& c = target.config();
    const auto roundings = [](std::size_t layers_before) { return roundings_per_layer * static_cast<double>(layers_before + 1); };
    for (const std::string prompt : {"p0", "p1"})
      for (const row_kind kind : {row_kind::prompt, row_kind::decode}) {
        CAPTURE(prompt);
        const std::vector<token_id> tokens = expected.ids(prompt + ".prompt");
        passes<B> run(target, ctx, tokens.size());
        stages_seen seen;
        const auto result = run.forward(tokens, tokens.size(), kind, seen);
        const auto want = [&](const std::string& stage) { return expected.floats(prompt + "." + stage); };

        check_close("embed", seen.rows.at("embed"), want("embed"), c.hidden_size, expected.tolerance("layer"), 1);
        if (c.ple_width != 0) check_close("ple", seen.rows.at("ple"), want("ple"), c.ple_width, expected.tolerance("layer"), roundings(0));
        for (std::size_t i = 0; i < c.layer_count(); ++i) {
          const std::string at = std::to_string(i);
          check_close("layer " + at, seen.rows.at("layer." + at), want("layer." + at), c.hidden_size, expected.tolerance("layer"),
                      roundings(i + 1));
          // Before its norm a branch has whatever size its values have cancelled to: some roundings more.
          if (expected.has(prompt + ".attention." + at))
            check_close("attention " + at, seen.rows.at("attention." + at), want("attention." + at), c.hidden_size,
                        expected.tolerance("layer"), 4 * roundings(i + 1));
          if (c.experts == 0) continue;
          const std::vector<token_id> experts = expected.ids(prompt + ".router." + at + ".experts");
          CHECK(seen.rows.at("router." + at + ".experts") == std::vector<float>(experts.begin(), experts.end()));
          check_close("expert weights " + at, seen.rows.at("router." + at + ".weights"), want("router." + at + ".weights"),
                      c.experts_per_token, expected.tolerance("layer"), roundings(i + 1));
        }
        check_close("hidden", copy_of(result.hidden), want("hidden"), c.hidden_size, expected.tolerance("hidden"),
                    roundings(c.layer_count() + 1));
        check_close("logits", copy_of(result.logits), want("logits"), c.vocab_size, expected.tolerance("logits"),
                    roundings(c.layer_count() + 1));

        run.cache.commit(tokens.size());
        for (const attention_kind attention : gemma4::attention_kinds) {
          const std::size_t donor = c.donor(attention);
          const std::string kv = std::string("kv.") + name_of(attention);
          CHECK(donor == expected.json.at("donors").at(name_of(attention)).template get<std::size_t>());
          const keys_and_values<float> rows(std::as_const(run.cache).layer(donor), 0, tokens.size());
          const std::size_t head_dim = c.shape(attention).head_dim;
          check_close(kv + ".k", rows.keys, want(kv + ".k"), head_dim, expected.tolerance("kv"), roundings(donor + 1));
          check_close(kv + ".v", rows.values, want(kv + ".v"), head_dim, expected.tolerance("kv"), roundings(donor + 1));
        }
      }
  }
}

}  // namespace models
