// Long sequences of few heads, with decays by dimension: time is divided among blocks in segments, so that the device
// is full.
//
// The effect of a segment is S_end = (F Z^T) * S_start + C, with F and Z the products of its decays. A first launch
// computes F, Z and C (a sweep from zeros) for all segments at once; a second carries the state from segment to
// segment; the third computes results, each segment from its own start. The way back is the same: dS_start = (F Z^T) *
// dS_end + C', where C' comes from a sweep back through q and dy alone.
//
// The chunked kernels divide sequences of all rules (chunked/passes.cuh).
#pragma once

#include "../carried_states.cuh"
#include "tile.cuh"

namespace fairseq_fastweights {

// The purpose of a launch of the forward kernel: results, or a segment's effect on a zero state, or on a zero gradient.
enum Purpose { kResults, kStateOfSegment, kGradientOfSegment };

struct TimeSegments {
    int count;     // 1: the sequence is not divided
    int length;    // in steps, of all but the last; a multiple of the interval between kept states, if any are kept
    void* states;  // (segment, head, key_dim, value_dim): C, then the segments' starts
    void* passed;  // (segment, head, key_dim + value_dim): F and Z

    DEVICE int begin(int segment) const { return segment * length; }
    DEVICE int steps(int segment, int time) const { return min(length, time - begin(segment)); }
};

constexpr int kShortestSegment = 128;

// Divides if `active` warps, or blocks, leave most of a device idle that is busy with `capacity` of them. The first
// launch costs about half of the last one, so that two segments would gain little.
inline TimeSegments find_time_segments(const Sizes& sizes, int64_t active, int64_t capacity) {
    TimeSegments segments{1, sizes.time, nullptr, nullptr};
    const int64_t wanted = capacity / active, most = sizes.time / kShortestSegment;
    const int64_t count = wanted < most ? wanted : most;
    if (count < 3) return segments;
    const int unit = kept_states(sizes) ? sizes.interval : 1;
    const int64_t length = (sizes.time + count - 1) / count, units = (length + unit - 1) / unit;
    if (units * unit >= sizes.time) return segments;
    segments.length = static_cast<int>(units * unit);
    segments.count = (sizes.time + segments.length - 1) / segments.length;
    return segments;
}

template <typename A>
size_t bytes_of_segments(const TimeSegments& segments, const Sizes& sizes) {
    if (segments.count == 1) return 0;
    const size_t of_head = static_cast<size_t>(sizes.key_dim) * sizes.value_dim + sizes.key_dim + sizes.value_dim;
    return sizeof(A) * segments.count * sizes.batch * sizes.heads * of_head;
}

template <typename A>
void place_segments(TimeSegments& segments, const Sizes& sizes, void* workspace) {
    segments.states = workspace;
    segments.passed = static_cast<A*>(workspace) + static_cast<int64_t>(segments.count) * sizes.batch * sizes.heads *
                                                       sizes.key_dim * sizes.value_dim;
}

template <typename A>
cudaError_t carry_segments(const TimeSegments& segments, const Sizes& sizes, const void* first, bool reverse,
                           cudaStream_t stream) {
    return launch_carry(segments.count, static_cast<A*>(segments.states),
                        PassedDecays<A>{static_cast<const A*>(segments.passed)}, sizes, first, reverse, stream);
}

}  // namespace fairseq_fastweights
