// The C interface of the native decode step: a list of tensor operations, run without Python.
//
// `gpu_worker/native_program.py` makes the list from a recording of the model; `native_dense.py`
// mirrors these declarations. An operation names its tensors by where they lie and how they are
// strided: views (slices, transposes, reshapes) therefore cost nothing here. Tensors of a running
// step lie in its *frame*, weights wherever torch holds them.
//
// **Bits.** Every result depends on the operands alone: sums have an order that only shapes decide,
// the same for any number of threads and on every instruction set, and what torch rounds to a dtype
// is rounded here.
#pragma once

#include <cstdint>

#include "experts.h"

constexpr int32_t HR_DENSE_VERSION = 2;
constexpr int HR_MAX_DIMS = 5;

enum HrValue : int16_t {
    HR_NO_VALUE = -1,  // the operand is the number x of the operation
    HR_VALUE_FLOAT32 = 0,
    HR_VALUE_BFLOAT16,
    HR_VALUE_FLOAT16,
    HR_VALUE_INT64,
    HR_VALUE_BOOL,
    HR_VALUE_COMPLEX64
};

enum HrOpCode : int32_t {
    // out[i] = f(a[i], b[i], c[i]), sizes are those of out
    HR_OP_COPY = 0,
    HR_OP_NEG,
    HR_OP_ABS,
    HR_OP_EXP,
    HR_OP_SIN,
    HR_OP_COS,
    HR_OP_SQRT,
    HR_OP_RSQRT,
    HR_OP_RECIPROCAL,
    HR_OP_SIGMOID,
    HR_OP_SILU,
    HR_OP_TANH,
    HR_OP_RELU,
    HR_OP_SQUARE,
    HR_OP_POW,    // to the power x
    HR_OP_CLAMP,  // to x .. y
    HR_OP_NOT,
    HR_OP_ADD,
    HR_OP_SUB,
    HR_OP_MUL,
    HR_OP_DIV,
    HR_OP_MAXIMUM,
    HR_OP_MINIMUM,
    HR_OP_GT,
    HR_OP_GE,
    HR_OP_LT,
    HR_OP_LE,
    HR_OP_EQ,
    HR_OP_NE,
    HR_OP_WHERE,  // a ? b : c
    HR_OP_POLAR,  // complex of magnitude a and angle b
    HR_OP_COMPLEX_MUL,
    HR_NUM_ELEMENTWISE,
    // rows of n values along the last dimension; the others are rows
    HR_OP_SUM = HR_NUM_ELEMENTWISE,
    HR_OP_MEAN,
    HR_OP_MAX,      // b: where, the first of equals
    HR_OP_SOFTMAX,
    HR_OP_LAYER_NORM,  // b weight, c bias, x epsilon
    HR_OP_TOPK,        // the n greatest (m & 1) or least, in order (m & 2); b: where; as torch chooses
    // by index
    HR_OP_GATHER,     // out[.., i, ..] = a[.., b[.., i, ..], ..] along dimension m
    HR_OP_SCATTER,    // out[.., b[.., i, ..], ..] = x along dimension m; sizes are those of b
    HR_OP_EMBEDDING,  // out[i] = a[b[i]], sizes [rows, width]
    // products
    HR_OP_LINEAR,  // out[rows, outputs] = a[rows, depth] * b[outputs, depth] + c; sizes in that order
    HR_OP_ATTEND,  // see HrCacheLayer
    HR_OP_PACKED_LINEAR,  // as linear, of the weights at address m, in the format that n packs:
                          // HrKind | HrScale << 8 | zero points << 16 | group size << 24
    HR_NUM_OPS
};

// Where a tensor lies: `offset` bytes into the frame, or an address. Strides count elements.
struct HrOperand {
    int64_t offset;
    int32_t strides[HR_MAX_DIMS];
    int16_t dtype;
    int16_t is_in_frame;
};

struct HrOp {
    int32_t code;
    int32_t num_dims;
    int32_t sizes[HR_MAX_DIMS];
    int32_t reserved;
    HrOperand out, a, b, c;
    double x, y;
    int64_t n, m;
};

// One layer of a sequence's cache. HR_OP_ATTEND adds keys b [kv heads, dim] and values c
// [kv heads, value dim] as row `end` of every head, then attends with a [heads, dim] to rows
// end - window + 1 .. end (all where window is 0); sizes [heads, kv heads, dim, value dim], out
// [heads, value dim]. x is the scale, n the layer, m the address of a float32 [heads] of sinks or 0.
struct HrCacheLayer {
    void* keys;
    void* values;
    int64_t key_head_stride;  // elements
    int64_t value_head_stride;
    int64_t end;
    int64_t window;
    int64_t room_number;  // the caller's own: which buffers these are
};

HR_EXPORT int32_t hr_dense_version();

// Run operations first .. last - 1 with instruction set number `isa`. Before, `num_in_bytes` from
// `in`, where that is not null, go to `in_offset` of the frame. Returns 0, or 1 when memory could
// not be had, or 2 when `isa` or an operation is none.
HR_EXPORT int32_t hr_dense_run(HrPool* pool, int32_t isa, const HrOp* ops, int64_t first,
                               int64_t last, char* frame, const HrCacheLayer* caches,
                               const void* in, int64_t in_offset, int64_t num_in_bytes);

// --------------------------------------------------------------------------- within the library

struct Kernels;
struct PackedKernels;

struct DenseRun {
    HrPool& pool;
    const Kernels& kernels;
    const PackedKernels& packed;
    char* frame;
    const HrCacheLayer* caches;

    template <class T = char>
    T* at(const HrOperand& operand) const {
        return reinterpret_cast<T*>(operand.is_in_frame ? frame + operand.offset
                                                        : reinterpret_cast<char*>(operand.offset));
    }
};

void run_elementwise(const DenseRun& run, const HrOp& op);
void run_rows(const DenseRun& run, const HrOp& op);
void run_indexed(const DenseRun& run, const HrOp& op);
// Linear operations of the same rows, one after the other in `ops`, are one job: num_together of them
// from ops[0] on, of num_ops that follow.
constexpr int MAX_TOGETHER = 8;
int num_together(const HrOp* ops, int64_t num_ops);
void run_linear(const DenseRun& run, const HrOp* ops, int num_ops);
// False when there is no such format.
bool run_packed_linear(const DenseRun& run, const HrOp* ops, int num_ops);
// Bytes of the weights of HR_OP_PACKED_LINEAR, 0 when there is no such format.
int64_t packed_linear_bytes(const HrOp& op);

// Tiles of several matrices, numbered through: the number of a tile to its matrix and place there.
struct JoinedTiles {
    int num_matrices = 0;
    int64_t begin[MAX_TOGETHER + 1] = {};

    void add(int64_t num_tiles) {
        begin[num_matrices + 1] = begin[num_matrices] + num_tiles;
        num_matrices++;
    }
    int64_t count() const { return begin[num_matrices]; }
    int matrix_of(int64_t tile) const {
        int matrix = 0;
        while (tile >= begin[matrix + 1]) matrix++;
        return matrix;
    }
};
void run_attend(const DenseRun& run, const HrOp& op);
