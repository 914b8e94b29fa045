// One row's way through one layer. If all its experts lie in slots, without a message and without
// Python: look at the residency table, compute, join, leave a report. Else up to the point where
// others must be asked: what they need to know is published, and what lies in slots may be computed.
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
    HR_NO_SLOT = 4,    // the table names a slot that does not exist
    HR_ROUTED = 5      // not all is in slots; the row is published, and `seen` says what is there
};

constexpr int64_t HR_MAX_TOP_K = 64;

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
    // activation segment: its first row, and its header
    void* hidden_row;      // [hidden_size], dtype of the form
    int32_t* choices_row;  // [top_k]
    int64_t* header;       // step, layer, number of rows, whether they are apart
    // how experts are computed, see hr_run
    HrPool* pool;
    const HrForm* form;
    int64_t isa;
    // of the step in progress
    int64_t epoch;
    int64_t step;
    int64_t joined_ns;  // when the layer before was joined, 0 in the first; set by hr_pass_layer
    int64_t starts_some;  // whether experts may be computed from the table though others are missing
    // after HR_ROUTED: the slot of each choice, or -1. If any is there, the fence stays entered.
    int32_t seen[HR_MAX_TOP_K];
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

// Compute choices ks[0 .. count) of the row from `slots`, into their places, with `most_threads`
// of the pool's threads or, if 0, all of them. Returns HR_PASSED, HR_NO_MEMORY or HR_UNKNOWN; that
// the slots exist is the caller's to check.
HR_EXPORT int32_t hr_compute_choices(const HrResidentLayers* layers, const void* hidden,
                                     int64_t count, const int64_t* ks, const int32_t* slots,
                                     int64_t most_threads);

// Add up all places into `out`, as hr_pass_layer does. Returns HR_PASSED or HR_UNKNOWN.
HR_EXPORT int32_t hr_join_row(const HrResidentLayers* layers, const void* weights,
                              int32_t weights_dtype, void* out);
