// The C interface of the native expert kernels: plain pointers and numbers, bound by ctypes.
//
// Nothing here knows Python, torch or processes. `expert_kernels/native_library.py` mirrors these
// declarations; `hr_abi_version` lets it refuse a library that was built from other sources.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define HR_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define HR_EXPORT extern "C"
#endif

constexpr int32_t HR_ABI_VERSION = 5;

enum HrDtype : int32_t { HR_FLOAT32 = 0, HR_BFLOAT16 = 1, HR_FLOAT16 = 2 };

// How weights are stored: row-major in the form's dtype, or as expert_store.formats has it.
enum HrKind : int32_t { HR_PLAIN = 0, HR_INT8, HR_INT4, HR_MXFP4, HR_NVFP4, HR_FP8 };

enum HrScale : int32_t {
    HR_SCALE_FLOAT32 = 0,
    HR_SCALE_FLOAT16,
    HR_SCALE_BFLOAT16,
    HR_SCALE_E8M0,
    HR_SCALE_E4M3
};

// In the order of expert_store.layout.GateKind's description.
enum HrGate : int32_t { HR_ACT_MUL = 0, HR_CLAMPED_ACT_MUL = 1, HR_ALPHA_SWIGLU = 2, HR_ACT = 3 };

// Activations by the names that transformers gives them; see gates_template.h for the formulas.
enum HrActivation : int32_t {
    HR_GELU = 0,
    HR_GELU_10,
    HR_GELU_ACCURATE,  // gelu_new is the same
    HR_GELU_FAST,
    HR_GELU_PYTORCH_TANH,
    HR_HARDSWISH,
    HR_LEAKY_RELU,
    HR_LINEAR,
    HR_MISH,
    HR_QUICK_GELU,
    HR_RELU,
    HR_RELU2,
    HR_RELU6,
    HR_SIGMOID,
    HR_SILU,  // swish is the same
    HR_SQRT_SOFTPLUS,
    HR_TANH,
    HR_NUM_ACTIVATIONS
};

// What every expert of a store computes and where its tensors begin within a block, in bytes.
struct HrForm {
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t dtype;
    int32_t gate;
    int32_t activation;
    int32_t has_gate;
    int32_t has_bias;
    int32_t is_transposed;
    int32_t is_interleaved;
    float alpha;
    float limit;
    int32_t kind;  // HrKind; what follows is for quantised weights
    int32_t scale;
    int32_t group_size;
    int32_t has_zero_points;
    int32_t reserved;
    int64_t first_offset;
    int64_t down_offset;
    int64_t first_bias_offset;
    int64_t down_bias_offset;
};

// One layer-step. Expert e of num_experts lies at blocks[e] and was chosen by the pairs
// pair_begin[e] .. pair_begin[e + 1]; pair p reads row row_ids[p] of `hidden` (dtype of the form,
// rows contiguous) and writes float32 row place_ids[p] of `places` (rows contiguous).
struct HrStep {
    int64_t num_experts;
    const void* const* blocks;
    const int64_t* pair_begin;
    const int64_t* row_ids;
    const int64_t* place_ids;
    const void* hidden;
    float* places;
    int64_t most_threads;  // that may take part; 0: all of the pool
};

struct HrPool;

HR_EXPORT int32_t hr_abi_version();

// Instruction sets that this binary and this processor both have, ascending: their names, or null
// past the last. Number 0 is "scalar".
HR_EXPORT const char* hr_isa_name(int32_t index);

// A pool of num_threads threads, the calling one included; null when threads cannot be started.
// A helper without work spins for spin_us microseconds, looks again for a while whenever nobody else
// wants its core, then sleeps until there is some.
HR_EXPORT HrPool* hr_pool_create(int32_t num_threads, int32_t spin_us);
HR_EXPORT void hr_pool_destroy(HrPool* pool);

// Compute a layer-step with instruction set number `isa`. Returns 0, or 1 when memory for the
// intermediate rows could not be had, or 2 when `form` or `isa` is none that this library knows.
HR_EXPORT int32_t hr_run(HrPool* pool, const HrForm* form, int32_t isa, const HrStep* step);

// Result rows of a layer-step, float32 [num_rows, top_k, hidden_size], and the router's weights
// [num_rows, top_k] -> [num_rows, hidden_size]; see weighted_sum.cpp. All contiguous.
struct HrWeightedSum {
    const float* rows;
    const void* weights;
    void* out;
    int64_t num_rows;
    int64_t top_k;
    int64_t hidden_size;
    int32_t weights_dtype;
    int32_t out_dtype;
};

// Returns 0, or 2 when a dtype is none.
HR_EXPORT int32_t hr_weighted_sum(const HrWeightedSum* sum);

// Bring num_bytes at `data` from memory with all threads of the pool and return a checksum of some:
// the read ceiling, if done as this machine likes it. A thread reads in num_streams streams side by
// side (1, 2, 4, 8 or 16, others count as the next below) and asks for what lies ahead_bytes behind and,
// if farther_bytes is not 0, into the second-level cache for what lies that much farther.
HR_EXPORT uint64_t hr_read(HrPool* pool, const void* data, int64_t num_bytes, int32_t num_streams,
                           int32_t ahead_bytes, int32_t farther_bytes);
