// See resident_layer.h.
//
// Order of memory. The fence is made odd before the table is looked at. A processor may look first
// all the same: the orchestrator, which has the time, makes the kernel run a barrier here before it
// draws conclusions (docs/architecture.md, "Layers that never wait"), so the compiler alone is kept
// from swapping the two. The fence is made even, and `head` moved, only after everything before.

#include "resident_layer.h"

#include <time.h>

#include <atomic>
#include <cstring>

#include "step_job.h"

namespace {

using Word = std::atomic<int64_t>;
static_assert(sizeof(Word) == sizeof(int64_t) && Word::is_always_lock_free,
              "a word of shared memory must be an atomic as it lies there");
static_assert(std::atomic<int32_t>::is_always_lock_free &&
                  sizeof(std::atomic<int32_t>) == sizeof(int32_t),
              "so must be an entry of the table");

constexpr int64_t WORDS_PER_LINE = 8;
constexpr int64_t HEADER_WORDS = 8;
// Longer than Python takes from a layer's output to the next operation.
constexpr int64_t AWAKE_US = 100;

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

Word& word(const HrResidentLayers& layers, int line) {
    return *reinterpret_cast<Word*>(layers.words + line * WORDS_PER_LINE);
}

Word& fence_of(const HrResidentLayers& layers) { return word(layers, 1); }
Word& head_of(const HrResidentLayers& layers) { return word(layers, 2); }
Word& tail_of(const HrResidentLayers& layers) { return word(layers, 3); }

// This thread is the only one that moves the fence.
void move_fence(const HrResidentLayers& layers) {
    Word& fence = fence_of(layers);
    fence.store(fence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

// Whether each choice is an expert of the layer, and none comes twice.
bool are_distinct_experts(const HrResidentLayers& layers, const int64_t* choices) {
    for (int64_t k = 0; k < layers.top_k; k++) {
        if (choices[k] < 0 || choices[k] >= layers.num_experts) return false;
        for (int64_t other = 0; other < k; other++)
            if (choices[other] == choices[k]) return false;
    }
    return true;
}

void report(const HrResidentLayers& layers, int64_t layer, const int64_t* choices,
            int64_t routed_ns, int64_t started_ns, int64_t ended_ns) {
    const int64_t number = head_of(layers).load(std::memory_order_relaxed);
    int64_t* row = layers.reports + number % layers.num_reports * layers.report_words;
    const int64_t header[HEADER_WORDS] = {layers.epoch, layers.step, layer,    layers.top_k,
                                          routed_ns,    started_ns,  ended_ns, layers.joined_ns};
    int32_t numbers[2 * HR_MAX_TOP_K];
    for (int64_t k = 0; k < layers.top_k; k++) {
        numbers[k] = int32_t(choices[k]);
        numbers[layers.top_k + k] = 1;
    }
    memcpy(row, header, sizeof header);
    memcpy(row + HEADER_WORDS, numbers, size_t(2 * layers.top_k) * sizeof(int32_t));
    head_of(layers).store(number + 1, std::memory_order_release);
}

// What others need to know to compute the row: their command names step and layer, and is dropped
// where the header names others, so the header is written last.
void publish(const HrResidentLayers& layers, int64_t layer, const void* hidden,
             const int64_t* choices) {
    const int64_t item_bytes = layers.form->dtype == HR_FLOAT32 ? 4 : 2;
    memcpy(layers.hidden_row, hidden, size_t(layers.form->hidden_size * item_bytes));
    for (int64_t k = 0; k < layers.top_k; k++) layers.choices_row[k] = int32_t(choices[k]);
    const int64_t header[] = {layers.step, layer, 1, 0};
    std::atomic_thread_fence(std::memory_order_release);
    for (int64_t i = 0; i < 4; i++)
        reinterpret_cast<Word*>(layers.header + i)->store(header[i], std::memory_order_relaxed);
}

}  // namespace

int32_t hr_compute_choices(const HrResidentLayers* layers, const void* hidden, int64_t count,
                           const int64_t* ks, const int32_t* slots, int64_t most_threads) {
    if (count < 0 || count > HR_MAX_TOP_K) return HR_UNKNOWN;
    const void* blocks[HR_MAX_TOP_K];
    int64_t begin[HR_MAX_TOP_K + 1], row_ids[HR_MAX_TOP_K];
    for (int64_t i = 0; i < count; i++) {
        blocks[i] = layers->slots + int64_t(slots[i]) * layers->slot_bytes;
        begin[i] = i;
        row_ids[i] = 0;
    }
    begin[count] = count;
    HrStep step{};
    step.num_experts = count;
    step.blocks = blocks;
    step.pair_begin = begin;
    step.row_ids = row_ids;
    step.place_ids = ks;
    step.hidden = hidden;
    step.places = layers->places;
    step.most_threads = most_threads;
    const int32_t fault = hr_run(layers->pool, layers->form, int32_t(layers->isa), &step);
    return fault == 0 ? HR_PASSED : fault == 1 ? HR_NO_MEMORY : HR_UNKNOWN;
}

int32_t hr_join_row(const HrResidentLayers* layers, const void* weights, int32_t weights_dtype,
                    void* out) {
    HrWeightedSum sum{};
    sum.rows = layers->places;
    sum.weights = weights;
    sum.out = out;
    sum.num_rows = 1;
    sum.top_k = layers->top_k;
    sum.hidden_size = layers->form->hidden_size;
    sum.weights_dtype = weights_dtype;
    sum.out_dtype = layers->form->dtype;
    return hr_weighted_sum(&sum) ? HR_UNKNOWN : HR_PASSED;
}

int32_t hr_pass_layer(HrResidentLayers* layers, int64_t layer, int64_t routed_ns,
                      const void* hidden, const int64_t* choices, const void* weights,
                      int32_t weights_dtype, void* out) {
    const HrResidentLayers& all = *layers;
    if (all.size_bytes != int64_t(sizeof all) || all.top_k < 1) return HR_UNKNOWN;
    if (layer < 0 || layer >= all.num_layers || all.top_k > HR_MAX_TOP_K) return HR_ASK;
    if (all.top_k > all.report_words - HEADER_WORDS || !are_distinct_experts(all, choices))
        return HR_ASK;
    const int64_t tail = tail_of(all).load(std::memory_order_acquire);
    if (head_of(all).load(std::memory_order_relaxed) - tail >= all.num_reports) return HR_ASK;

    move_fence(all);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    const auto* table =
        reinterpret_cast<const std::atomic<int32_t>*>(all.table + layer * all.num_experts);
    int32_t* slots = layers->seen;
    int64_t ks[HR_MAX_TOP_K], num_there = 0;
    for (int64_t k = 0; k < all.top_k; k++) {
        ks[k] = k;
        slots[k] = table[choices[k]].load(std::memory_order_acquire);
        if (slots[k] >= all.num_slots) {
            move_fence(all);
            return HR_NO_SLOT;
        }
        num_there += slots[k] >= 0;
    }
    if (num_there < all.top_k) {
        if (num_there == 0 || !all.starts_some) {
            move_fence(all);
            for (int64_t k = 0; k < all.top_k; k++) slots[k] = -1;
        }
        publish(all, layer, hidden, choices);
        return HR_ROUTED;
    }
    const int64_t started_ns = now_ns();
    const int32_t fault = hr_compute_choices(layers, hidden, all.top_k, ks, slots, 0);
    const int64_t ended_ns = now_ns();
    if (fault) return fault;
    if (hr_join_row(layers, weights, weights_dtype, out)) return HR_UNKNOWN;
    report(all, layer, choices, routed_ns, started_ns, ended_ns);
    move_fence(all);
    layers->joined_ns = now_ns();
    // The dense part of the next layer follows.
    all.pool->threads.keep_awake(AWAKE_US, false);
    return HR_PASSED;
}
