// The way back needs the states that the forward pass did not keep. They are computed again, for each chunk from a state
// before it: the one that was kept at the start of its interval, or one that was put down in the workspace since. An
// interval's last chunk comes first; on the sweep to it every `spacing`-th state is put down, so that the sweeps to the
// other chunks are short. With 8 and 16 chunks to an interval they take 2.0 and 2.3 chunks each, and not 3.5 and
// 7.5; up to 4 chunks, where it would be 1.0 and not 1.5, none are put down.
#pragma once

#include "segments.cuh"

namespace fairseq_fastweights {

struct Checkpoints {
    int interval;  // steps between the states that were kept; no less than there are, if none were
    int spacing;   // steps between those that are put down
    int slots;     // for those of an interval
    int count;     // of the states that were kept for a head
    size_t bytes;  // of the workspace: each block of a launch has slots of its own
    float* states;

    void place(void* workspace, const Segments& segments) {
        states = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace) + segments.bytes());
    }

    // Loads the last state that there is at or before step `start` of the interval that begins at `base`, as `part` loads
    // one. `swept`: those of the interval have been put down. Returns the step before which it is.
    template <typename State>
    __device__ __forceinline__ int load(State& state, const StatePart& part, const void* initial, const void* kept,
                                        int64_t head, int64_t block, int base, int start, bool swept) const {
        const int passed = swept && slots > 0 ? (start - base) / spacing : 0;
        StatePart place = part;
        const float* from = static_cast<const float*>(base == 0 ? initial : kept);
        int64_t index = base == 0 ? head : head * count + base / interval - 1;
        if (passed > 0) {
            place = of_block(part);
            from = states;
            index = block * slots + passed - 1;
        }
        place.load<true>(state, from, index);
        return base + passed * spacing;
    }

    // Puts the state before step `now` down, if it is one of those.
    template <typename State>
    __device__ __forceinline__ void put_down(State& state, const StatePart& part, int64_t block, int base,
                                             int now) const {
        if (slots > 0 && now > base && (now - base) % spacing == 0)
            of_block(part).store(state, states, block * slots + (now - base) / spacing - 1);
    }

private:
    // For a block's columns alone.
    __device__ __forceinline__ static StatePart of_block(const StatePart& part) {
        return {part.key_dim, part.columns, 0, part.columns, part.key_rows};
    }
};

inline Checkpoints find_checkpoints(const Plan& plan, const Sizes& sizes, const Segments& segments) {
    if (plan.chunk == 0) return Checkpoints{};
    const int interval = interval_of(sizes, plan.chunk);
    const Sweep sweep(interval / plan.chunk);
    const size_t states = static_cast<size_t>(segments.index(segments.count, 0)) * sweep.slots;
    const size_t bytes = states * sizes.key_dim * plan.columns * sizeof(float);
    return {interval, sweep.spacing * plan.chunk, sweep.slots, kept_states(sizes), bytes, nullptr};
}

}  // namespace fairseq_fastweights
