// One row's way through one layer whose experts all lie in slots, without a message and without
// Python: look at the residency table, compute, join, leave a report.
//
// What the words of the residency segment mean is written in protocol/residency.py; this is the
// side of its `ResidencyReader`, and both may be used in turn by one thread of the one gpu_worker.
#pragma once

#include "experts.h"

enum HrPass : int32_t {
    HR_PASSED = 0,     // `out` holds the layer's output, and one report more is in the ring
    HR_ASK = 1,        // not all is in slots, or it could not be reported: nothing has happened
    HR_NO_MEMORY = 2,  // for the intermediate rows
    HR_UNKNOWN = 3,    // a form, an instruction set or a dtype that this library does not know
    HR_NO_SLOT = 4     // the table names a slot that does not exist
};

// What stays the same from layer to layer. Pointers are into shared memory as this process has
// mapped it; `size_bytes` is sizeof(HrResidentLayers), so that a caller built from other sources is
// refused.
struct HrResidentLayers {
    int64_t size_bytes;
    // residency segment
    int64_t* words;  // epoch, fence, head, tail: word 0, 8, 16 and 24
    const int32_t* table;  // [num_layers, num_experts]
    int64_t* reports;      // [num_reports, report_words]
    int64_t num_layers;
    int64_t num_experts;
    int64_t num_reports;
    int64_t report_words;
    // slots, and the place of choice k: float32 row k of `places`
    const char* slots;
    int64_t num_slots;
    int64_t slot_bytes;
    float* places;  // [top_k, hidden_size]
    int64_t top_k;
    // how experts are computed, see hr_run
    HrPool* pool;
    const HrForm* form;
    int64_t isa;
    // of the step in progress
    int64_t epoch;
    int64_t step;
    int64_t joined_ns;  // when the layer before was joined, 0 in the first; set by hr_pass_layer
};

// Take one row through MoE layer `layer`.
//
//     routed_ns      when the router's output was there, CLOCK_MONOTONIC
//     hidden         [hidden_size], dtype of the form
//     choices        [top_k], experts, best first
//     weights        [top_k], an HrDtype
//     out            [hidden_size], dtype of the form
//
// Returns an HrPass. After HR_PASSED, `joined_ns` is the time at which `out` was complete.
HR_EXPORT int32_t hr_pass_layer(HrResidentLayers* layers, int64_t layer, int64_t routed_ns,
                                const void* hidden, const int64_t* choices, const void* weights,
                                int32_t weights_dtype, void* out);
