// Linear layers whose weights are quantised, in tiles of 16 outputs (packed.h).
//
// Rows are quantised as those of experts are, before the job; a tile of the job is a stretch of the
// matrix's tiles. What a row gives does not hang on the rows beside it, so prompts and single tokens
// compute one function.

#include <algorithm>

#include "dense_values.h"
#include "packed.h"
#include "step_job.h"

namespace {

constexpr int64_t JOB_TILE_BYTES = 128 * 1024;
constexpr int MAX_OUTPUTS = 256;
constexpr int ROWS_PER_PASS = 64;

struct PackedLinearJob {
    const DenseRun& run;
    const HrOp& op;
    const PackedFormat& format;
    const char* tiles;
    int64_t tile_bytes;
    int64_t tiles_per_job_tile;
    const PackedRow* rows;
};

void run_packed_tile(void* context, int64_t number) {
    const PackedLinearJob& job = *static_cast<const PackedLinearJob*>(context);
    const HrOp& op = job.op;
    const int64_t num_rows = op.sizes[0], outputs = op.sizes[1];
    const int64_t first = number * job.tiles_per_job_tile;
    const int64_t begin = first * TILE_OUTPUTS;
    const int64_t num_tiles =
        std::min(job.tiles_per_job_tile, (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS - first);
    const int count = int(std::min(num_tiles * TILE_OUTPUTS, outputs - begin));
    const int64_t out_item = bytes_of(op.out.dtype);
    alignas(64) float sums[ROWS_PER_PASS * MAX_OUTPUTS];
    float biases[MAX_OUTPUTS];
    const float* bias = nullptr;
    if (op.c.dtype != HR_NO_VALUE)
        bias = widen_values<float>(
            op.c.dtype, job.run.at(op.c) + begin * op.c.strides[0] * bytes_of(op.c.dtype),
            op.c.strides[0], count, biases);
    PackedProduct product{};
    product.format = &job.format;
    product.tiles = job.tiles + first * job.tile_bytes;
    product.tile_bytes = job.tile_bytes;
    product.num_tiles = int32_t(num_tiles);
    product.num_groups = int32_t(packed_groups(job.format, op.sizes[2]));
    product.out = sums;
    product.out_stride = MAX_OUTPUTS;
    for (int64_t done = 0; done < num_rows; done += ROWS_PER_PASS) {
        product.rows = job.rows + done;
        product.num_rows = int32_t(std::min<int64_t>(ROWS_PER_PASS, num_rows - done));
        job.run.packed.multiply[job.format.kind - 1](product);
        for (int m = 0; m < product.num_rows; m++) {
            float* row = sums + m * MAX_OUTPUTS;
            if (bias)
                for (int i = 0; i < count; i++) row[i] += bias[i];
            char* out = job.run.at(op.out) +
                        ((done + m) * op.out.strides[0] + begin * op.out.strides[1]) * out_item;
            narrow_values<float>(op.out.dtype, out, op.out.strides[1], count, row);
        }
    }
}

}  // namespace

bool run_packed_linear(const DenseRun& run, const HrOp& op) {
    HrForm form{};
    form.kind = int32_t(op.n & 0xff);
    form.scale = int32_t(op.n >> 8 & 0xff);
    form.has_zero_points = int32_t(op.n >> 16 & 0xff);
    form.group_size = int32_t(op.n >> 24);
    PackedFormat format;
    if (!find_packed_format(form, format)) return false;
    const int64_t num_rows = op.sizes[0], outputs = op.sizes[1], depth = op.sizes[2];
    const int64_t num_groups = packed_groups(format, depth);
    const int64_t width = num_groups * format.group_size;
    const bool has_codes = format.kind != HR_FP8;
    RowScratch& scratch = run.pool.hidden;
    float* values = scratch.values.items(num_rows * width);
    int16_t* codes = has_codes ? scratch.codes.items(num_rows * width) : nullptr;
    float* scales = has_codes ? scratch.scales.items(num_rows * num_groups) : nullptr;
    int32_t* sums = has_codes ? scratch.sums.items(num_rows * num_groups) : nullptr;
    PackedRow* rows = scratch.rows.items(num_rows);
    const int64_t item = bytes_of(op.a.dtype);
    for (int64_t r = 0; r < num_rows; r++) {
        float* to = values + r * width;
        const char* from = run.at(op.a) + r * op.a.strides[0] * item;
        const float* found =
            widen_values<float>(op.a.dtype, from, op.a.strides[1], int(depth), to);
        if (found != to) std::copy(found, found + depth, to);
        std::fill(to + depth, to + width, 0.0f);
        rows[r] = {nullptr, nullptr, nullptr, to};
        if (!has_codes) continue;
        rows[r] = {codes + r * width, scales + r * num_groups, sums + r * num_groups, to};
        quantise_row(run.packed, format, to, num_groups, codes + r * width,
                     scales + r * num_groups, sums + r * num_groups);
    }
    const int64_t tile_bytes = packed_tile_bytes(format, depth);
    const int64_t num_tiles = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const int64_t wanted = std::max<int64_t>(JOB_TILE_BYTES / tile_bytes, 1);
    PackedLinearJob job{run, op, format, reinterpret_cast<const char*>(op.m), tile_bytes,
                        std::min<int64_t>({round_up(wanted, 8), num_tiles,
                                           MAX_OUTPUTS / TILE_OUTPUTS}),
                        rows};
    run.pool.threads.run((num_tiles + job.tiles_per_job_tile - 1) / job.tiles_per_job_tile,
                         useful_threads(run.pool, num_tiles * tile_bytes), run_packed_tile, &job);
    return true;
}
