// What the policy `reuse` learns from one layer-step (orchestrator/core/reuse.py has the formulas):
// one pass over the experts of a layer, into the policy's own arrays. Loaded by
// orchestrator/native_reuse.py; numpy does the same some ten times slower.

#include <cmath>
#include <cstdint>

extern "C" {

// All arrays belong to the policy; C order. E = num_experts, L = num_layers, T = num_tables,
// K = max_chosen.
struct HrReuse {
  int32_t num_layers, num_experts, num_tables, top_k, max_chosen, reserved;
  float* state;            // [L, 4, E]: three decayed frequencies, then the number of choices
  const float* decay;      // [3]
  const float* floors;     // [3]
  const float* weights;    // [3], negative
  double odds_factor;
  double discount;         // g
  double discount_tokens;
  double table_prior, evidence_floor, evidence_weight, least_product;
  float* tables;           // [L, T, E, E]
  float* pairs;            // [L, T, E]
  double* num_choices;     // [L]
  int32_t* latest;         // [L, 1 + K]: how many, then which were chosen at the last visit
  int32_t* sources;        // [L, 1 + T K]: how many, then rows of this layer's tables
  const uint8_t* is_placed;  // [L, E]
  double* worth;           // [L, E]
  double* rank;            // [L, E]
  float* odds;             // [E], scratch
  double* products;        // [E], scratch
};

__attribute__((visibility("default"))) int32_t hr_reuse_version() { return 1; }

// `chosen` are the `num_chosen` experts of `layer`; `tick` counts layer-steps from 1.
__attribute__((visibility("default"))) void hr_reuse_learn(
    const HrReuse* reuse, int32_t layer, const int32_t* chosen, int32_t num_chosen, double tick) {
  const HrReuse& r = *reuse;
  const int32_t E = r.num_experts;
  float* row = r.state + static_cast<int64_t>(layer) * 4 * E;

  // Decay and raise the frequencies.
  for (int h = 0; h < 3; ++h) {
    const float decay = r.decay[h];
    for (int32_t e = 0; e < E; ++e) row[h * E + e] *= decay;
  }
  for (int32_t k = 0; k < num_chosen; ++k)
    for (int h = 0; h < 4; ++h) row[h * E + chosen[k]] += 1.0f;
  r.num_choices[layer] += num_chosen;

  // exp(-z), the odds against being chosen.
  const float factor = static_cast<float>(r.odds_factor);
  for (int32_t e = 0; e < E; ++e) {
    float log_odds = 0.0f;
    for (int h = 0; h < 3; ++h)
      log_odds += r.weights[h] * std::log(row[h * E + e] + r.floors[h]);
    r.odds[e] = std::exp(log_odds) * factor;
  }

  // Learn the pairs of what was chosen a token ago and now, and remember what is chosen now.
  const int32_t T = r.num_tables;
  bool has_evidence = false;
  if (T > 0) {
    const int32_t num_known = num_chosen > 2 * r.top_k ? 0 : num_chosen;
    float* tables = r.tables + static_cast<int64_t>(layer) * T * E * E;
    float* pairs = r.pairs + static_cast<int64_t>(layer) * T * E;
    int32_t* sources = r.sources + static_cast<int64_t>(layer) * (1 + T * r.max_chosen);
    if (num_known > 0) {
      for (int32_t s = 0; s < sources[0]; ++s) {
        float* counts = tables + static_cast<int64_t>(sources[1 + s]) * E;
        for (int32_t k = 0; k < num_known; ++k) counts[chosen[k]] += 1.0f;
        pairs[sources[1 + s]] += 1.0f;
      }
    }
    int32_t* latest = r.latest + static_cast<int64_t>(layer) * (1 + r.max_chosen);
    latest[0] = num_known;
    for (int32_t k = 0; k < num_known; ++k) latest[1 + k] = chosen[k];
    int32_t count = 0;
    for (int32_t j = 0; j < T; ++j) {
      const int32_t from = ((layer - j) % r.num_layers + r.num_layers) % r.num_layers;
      const int32_t* other = r.latest + static_cast<int64_t>(from) * (1 + r.max_chosen);
      for (int32_t k = 0; k < other[0]; ++k) sources[1 + count++] = other[1 + k] + j * E;
    }
    sources[0] = count;
    has_evidence = count > 0;
    if (has_evidence) {
      const double whole = r.num_choices[layer] / r.top_k;
      for (int32_t e = 0; e < E; ++e) r.products[e] = 1.0;
      for (int32_t s = 0; s < count; ++s) {
        const float* counts = tables + static_cast<int64_t>(sources[1 + s]) * E;
        const double share = 1.0 / (pairs[sources[1 + s]] + r.table_prior);
        const double floor = share * r.table_prior + r.evidence_floor;
        for (int32_t e = 0; e < E; ++e)
          r.products[e] *= counts[e] * share * (whole / row[3 * E + e]) + floor;
      }
      for (int32_t e = 0; e < E; ++e) {
        double product = r.products[e];
        if (product < r.least_product) product = r.least_product;
        if (product > 1 / r.least_product) product = 1 / r.least_product;
        r.products[e] = std::pow(product, -r.evidence_weight);
      }
    }
  }

  // The worth: expected discounted reuse, less the time of the visit.
  const double g = r.discount;
  const double distance = (tick / r.num_layers + 1) / r.discount_tokens;
  double* worth = r.worth + static_cast<int64_t>(layer) * E;
  double* rank = r.rank + static_cast<int64_t>(layer) * E;
  const uint8_t* placed = r.is_placed + static_cast<int64_t>(layer) * E;
  for (int32_t e = 0; e < E; ++e) {
    const float later = r.odds[e];
    float loss;
    if (T > 0) {
      const float next = has_evidence ? later * static_cast<float>(r.products[e]) : later;
      const float spread = later * static_cast<float>(1 / g - 1) + static_cast<float>(1 / g);
      loss = std::log((1.0f + next) / (1.0f + next / spread));
    } else {
      loss = std::log1p(later * static_cast<float>(1 - g));
    }
    worth[e] = -distance - loss;
    if (placed[e]) rank[e] = worth[e];
  }
}

}  // extern "C"
