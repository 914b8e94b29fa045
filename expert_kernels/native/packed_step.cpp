// Layer-steps of experts whose weights are quantised, in tiles of 16 outputs.
//
// Integer formats take their rows as 16-bit codes (packed.h): the hidden rows are quantised before
// the job, an expert's intermediate rows by whoever computes the last tile of its first projection.
// So does fp8 where rows are bfloat16 and there are kernels for that: the codes are those numbers.

#include "step_job.h"

namespace {

constexpr int64_t LEAST_TILE_BYTES = 48 * 1024;
constexpr int MAX_UNITS = 512;
constexpr int STREAMS = 8;  // the kernels read up to so many of the matrix's tiles side by side
constexpr int ROWS_PER_PASS = 64;
// Sums of a row from those of the next: no power of two, as in plain_step.cpp.
constexpr int FIRST_STRIDE = 2 * MAX_UNITS + TILE_OUTPUTS;
constexpr int DOWN_STRIDE = MAX_UNITS + TILE_OUTPUTS;

// From one row's values to the next one's: rows as long as a power of two would all lie in the same
// few lines of a cache.
int64_t apart_in_cache(int64_t depth) { return depth + TILE_OUTPUTS; }

struct PackedJob {
    const HrForm& form;
    const PackedFormat& format;
    const PackedKernels& kernels;
    const PairKernels* pairs;  // null: `kernels` multiply
    const Gates& gates;
    const HrStep& step;
    std::vector<Expert> experts;
    std::unique_ptr<std::atomic<int32_t>[]> num_missing;  // first tiles, + 1 until quantised
    const PackedRow* hidden;  // by row
    PackedRow* middle;        // by pair
    float* middle_values;     // [pair, apart_in_cache(middle_depth)]
    int64_t middle_depth;     // a multiple of the group size
    int32_t ways;             // 2: gate and up
    int64_t first_bytes;      // of a tile of the first projection's matrix
    int64_t down_bytes;
    int32_t first_units;  // intermediate units per tile of the job; a multiple of 16
    int32_t first_tiles;
    int32_t down_outputs;
    int32_t down_tiles;

    int64_t num_tiles() const { return int64_t(experts.size()) * (first_tiles + down_tiles); }
    bool has_codes() const { return format.kind != HR_FP8 || pairs; }
};

// Rows of `depth` values (a multiple of the group size), ready to be quantised in place.
PackedRow* lay_out_rows(RowScratch& scratch, const PackedJob& job, int64_t num_rows,
                        int64_t depth) {
    const int64_t num_groups = depth / job.format.group_size;
    float* values = scratch.values.items(num_rows * apart_in_cache(depth));
    const bool has_codes = job.has_codes();
    int16_t* codes = has_codes ? scratch.codes.items(num_rows * depth) : nullptr;
    float* scales = has_codes ? scratch.scales.items(num_rows * num_groups) : nullptr;
    int32_t* sums = has_codes ? scratch.sums.items(num_rows * num_groups) : nullptr;
    PackedRow* rows = scratch.rows.items(num_rows);
    for (int64_t row = 0; row < num_rows; row++) {
        rows[row].values = values + row * apart_in_cache(depth);
        rows[row].codes = has_codes ? codes + row * depth : nullptr;
        rows[row].scales = has_codes ? scales + row * num_groups : nullptr;
        rows[row].sums = has_codes ? sums + row * num_groups : nullptr;
    }
    return rows;
}

// The row's memory is the job's own scratch, which PackedRow shows to the kernels as constant.
void quantise_row(const PackedJob& job, const PackedRow& row, int64_t depth) {
    if (job.pairs)
        job.pairs->lay(row.values, depth, const_cast<int16_t*>(row.codes));
    else if (job.has_codes())
        quantise_row(job.kernels, job.format, row.values, depth / job.format.group_size,
                     const_cast<int16_t*>(row.codes), const_cast<float*>(row.scales),
                     const_cast<int32_t*>(row.sums));
}

void multiply(const PackedJob& job, const PackedProduct& product) {
    (job.pairs ? job.pairs->multiply : job.kernels.multiply[job.format.kind - 1])(product);
}

// The gate of `count` units from `begin` on, of one row whose sums are 16 gates, 16 ups, ...
void gate_units(const PackedJob& job, const Expert& expert, const float* sums, float* out,
                int64_t begin, int64_t count) {
    const HrForm& form = job.form;
    const int64_t item = item_bytes(form.dtype);
    for (int64_t done = 0; done < count; done += TILE_OUTPUTS) {
        GateRow row{};
        row.sums = sums + done * job.ways;
        row.up_begin = TILE_OUTPUTS;
        row.step = 1;
        row.bias = form.has_bias ? expert.block + form.first_bias_offset + (begin + done) * item
                                 : nullptr;
        row.bias_up_begin = form.intermediate_size;
        row.out = out + done;
        row.count = int32_t(std::min<int64_t>(TILE_OUTPUTS, count - done));
        job.gates.apply_gate(form, row);
    }
}

// Where the weights of a tile of the job lie.
PackedTiles tiles_of(const PackedJob& job, int64_t tile) {
    const HrForm& form = job.form;
    const int64_t num_first = int64_t(job.experts.size()) * job.first_tiles;
    const bool is_first = tile < num_first;
    if (!is_first) tile -= num_first;
    const int64_t per_expert = is_first ? job.first_tiles : job.down_tiles;
    const int64_t per_tile = is_first ? job.first_units : job.down_outputs;
    const int64_t ways = is_first ? job.ways : 1;
    const int64_t bytes = is_first ? job.first_bytes : job.down_bytes;
    const int64_t begin = tile % per_expert * per_tile;
    const int64_t end = std::min<int64_t>(
        begin + per_tile, is_first ? form.intermediate_size : form.hidden_size);
    const char* matrix = job.experts[size_t(tile / per_expert)].block +
                         (is_first ? form.first_offset : form.down_offset);
    return {matrix + begin / TILE_OUTPUTS * ways * bytes, bytes,
            int32_t((end - begin + TILE_OUTPUTS - 1) / TILE_OUTPUTS * ways)};
}

void run_first_tile(PackedJob& job, size_t number, int64_t tile, PackedProduct& product) {
    const HrForm& form = job.form;
    const Expert& expert = job.experts[number];
    const int64_t begin = tile * job.first_units;
    const int64_t count = std::min<int64_t>(job.first_units, form.intermediate_size - begin);

    alignas(64) float sums[ROWS_PER_PASS * FIRST_STRIDE];
    PackedRow rows[ROWS_PER_PASS];
    product.num_groups = int32_t(packed_groups(job.format, form.hidden_size));
    product.rows = rows;
    product.out = sums;
    product.out_stride = FIRST_STRIDE;
    for (int64_t done = 0; done < expert.num_pairs; done += ROWS_PER_PASS) {
        const int64_t pair = expert.first_pair + done;
        product.num_rows = int32_t(std::min<int64_t>(ROWS_PER_PASS, expert.num_pairs - done));
        for (int m = 0; m < product.num_rows; m++)
            rows[m] = job.hidden[job.step.row_ids[pair + m]];
        multiply(job, product);
        for (int m = 0; m < product.num_rows; m++)
            gate_units(job, expert, sums + m * product.out_stride,
                       job.middle_values + (pair + m) * apart_in_cache(job.middle_depth) + begin,
                       begin, count);
    }
    if (job.num_missing[number].fetch_sub(1, std::memory_order_acq_rel) != 2) return;
    for (int64_t pair = expert.first_pair; pair < expert.first_pair + expert.num_pairs; pair++)
        quantise_row(job, job.middle[pair], job.middle_depth);
    job.num_missing[number].store(0, std::memory_order_release);
}

void run_down_tile(PackedJob& job, size_t number, int64_t tile, PackedProduct& product) {
    const HrForm& form = job.form;
    const Expert& expert = job.experts[number];
    const int64_t begin = tile * job.down_outputs;
    const int64_t count = std::min<int64_t>(job.down_outputs, form.hidden_size - begin);
    const char* bias = form.has_bias
                           ? expert.block + form.down_bias_offset + begin * item_bytes(form.dtype)
                           : nullptr;
    wait_for_zero(job.num_missing[number]);

    alignas(64) float sums[ROWS_PER_PASS * DOWN_STRIDE];
    product.num_groups = int32_t(packed_groups(job.format, form.intermediate_size));
    product.out = sums;
    product.out_stride = DOWN_STRIDE;
    for (int64_t done = 0; done < expert.num_pairs; done += ROWS_PER_PASS) {
        const int64_t pair = expert.first_pair + done;
        product.num_rows = int32_t(std::min<int64_t>(ROWS_PER_PASS, expert.num_pairs - done));
        product.rows = job.middle + pair;
        multiply(job, product);
        for (int m = 0; m < product.num_rows; m++)
            job.gates.finish_row(
                form, sums + m * DOWN_STRIDE, bias,
                job.step.places + job.step.place_ids[pair + m] * form.hidden_size + begin, count);
    }
}

void run_tile(void* context, int64_t tile, int64_t next) {
    PackedJob& job = *static_cast<PackedJob*>(context);
    PackedProduct product{};
    product.format = &job.format;
    const PackedTiles tiles = tiles_of(job, tile);
    product.tiles = tiles.begin;
    product.tile_bytes = tiles.tile_bytes;
    product.num_tiles = tiles.count;
    if (next >= 0) product.next = tiles_of(job, next);
    const int64_t num_first = int64_t(job.experts.size()) * job.first_tiles;
    if (tile < num_first)
        return run_first_tile(job, size_t(tile / job.first_tiles), tile % job.first_tiles, product);
    tile -= num_first;
    run_down_tile(job, size_t(tile / job.down_tiles), tile % job.down_tiles, product);
}

// Outputs per tile of the job, a multiple of 16, so that it has about `wanted_bytes`.
int32_t outputs_per_tile(int64_t wanted_bytes, int64_t tile_bytes, int64_t ways,
                         int64_t num_outputs) {
    const int64_t count = std::max<int64_t>(wanted_bytes / (tile_bytes * ways), 1);
    const int64_t wanted = round_up(count, STREAMS / ways) * TILE_OUTPUTS;
    return int32_t(
        std::min({wanted, round_up(num_outputs, TILE_OUTPUTS), int64_t(MAX_UNITS)}));
}

}  // namespace

void run_packed_step(HrPool& pool, const HrForm& form, const PackedFormat& format,
                     const PackedKernels& kernels, const PairKernels* pairs, const Gates& gates,
                     const HrStep& step) {
    PackedJob job{form,    format,  kernels, nullptr, gates, step, chosen_experts(step), nullptr,
                  nullptr, nullptr, nullptr, 0,       0,     0,    0,                    0,
                  0,       0,       0};
    if (job.experts.empty()) return;
    if (format.kind == HR_FP8 && form.dtype == HR_BFLOAT16) job.pairs = pairs;
    job.ways = form.has_gate ? 2 : 1;
    job.first_bytes = packed_tile_bytes(format, form.hidden_size);
    job.down_bytes = packed_tile_bytes(format, form.intermediate_size);
    const int64_t first_total =
        round_up(form.intermediate_size, TILE_OUTPUTS) / TILE_OUTPUTS * job.ways * job.first_bytes;
    const int64_t down_total =
        round_up(form.hidden_size, TILE_OUTPUTS) / TILE_OUTPUTS * job.down_bytes;
    const int64_t total = int64_t(job.experts.size()) * (first_total + down_total);
    const int num_threads = useful_threads(pool, total, step.most_threads);
    const int64_t tile_bytes =
        expert_tile_bytes(total, num_threads, most_rows_of(job.experts), LEAST_TILE_BYTES);
    job.first_units =
        outputs_per_tile(tile_bytes, job.first_bytes, job.ways, form.intermediate_size);
    job.first_tiles = (form.intermediate_size + job.first_units - 1) / job.first_units;
    job.down_outputs = outputs_per_tile(tile_bytes, job.down_bytes, 1, form.hidden_size);
    job.down_tiles = (form.hidden_size + job.down_outputs - 1) / job.down_outputs;
    if (job.num_tiles() > MAX_TILES) throw std::bad_alloc();
    job.num_missing.reset(new std::atomic<int32_t>[job.experts.size()]);
    for (size_t e = 0; e < job.experts.size(); e++) job.num_missing[e] = job.first_tiles + 1;

    const int64_t num_rows = num_rows_of(step), num_pairs = step.pair_begin[step.num_experts];
    const int64_t hidden_depth = round_up(form.hidden_size, format.group_size);
    job.middle_depth = round_up(form.intermediate_size, format.group_size);
    PackedRow* hidden = lay_out_rows(pool.hidden, job, num_rows, hidden_depth);
    job.middle = lay_out_rows(pool.middle, job, num_pairs, job.middle_depth);
    job.middle_values = pool.middle.values.items(0);
    job.hidden = hidden;
    const int64_t row_bytes = form.hidden_size * item_bytes(form.dtype);
    for (int64_t row = 0; row < num_rows; row++) {
        float* values = pool.hidden.values.items(0) + row * apart_in_cache(hidden_depth);
        gates.widen_row(form.dtype, static_cast<const char*>(step.hidden) + row * row_bytes, values,
                        form.hidden_size);
        std::fill(values + form.hidden_size, values + hidden_depth, 0.0f);
        quantise_row(job, hidden[row], hidden_depth);
    }
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        float* values = job.middle_values + pair * apart_in_cache(job.middle_depth);
        std::fill(values + form.intermediate_size, values + job.middle_depth, 0.0f);
    }
    pool.threads.run(job.num_tiles(), num_threads, run_tile, &job);
}
