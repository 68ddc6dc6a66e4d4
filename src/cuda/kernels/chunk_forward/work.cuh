// Blocks that go from chunk to chunk, each with a sequence, a value head and a slab of V: what they work on, and which states
// they read and write on the way.
#pragma once

#include "cuda/kernels/chunk_forward/params.hpp"
#include "cuda/views/views.cuh"

namespace flashqla::cuda {

/// What a block works on.
struct AdvanceWork {
  SequenceRows rows;
  std::int64_t sequence;
  std::int32_t head, head_qk;
  int first_v;  // of the block's slab
};

/// What block `index` works on, sequences in the order of the table.
template <int kSlab>
FLASHQLA_DEVICE AdvanceWork advance_work(const ChunkForwardParams& p, std::int64_t index) {
  const std::int64_t slabs = (p.dim_v + kSlab - 1) / kSlab;
  AdvanceWork work;
  work.first_v = static_cast<int>(index % slabs) * kSlab;
  work.head = static_cast<std::int32_t>(index / slabs % p.heads_v);
  work.head_qk = work.head / p.group;
  const std::int64_t turn = index / slabs / p.heads_v;
  work.sequence = p.sequences.order != nullptr ? p.sequences.order[turn] : turn;
  work.rows = sequence_rows(p.sequences, work.sequence);
  return work;
}

/// Chunks from the sequence's start of which every row may be moved 16 bytes at a time; none unless all columns are there
/// (`full`).
FLASHQLA_DEVICE std::int32_t whole_chunks(const ChunkForwardParams& p, const AdvanceWork& work, bool full) {
  return full && p.aligned != 0 && work.rows.shift == 0 ? static_cast<std::int32_t>(work.rows.length / kChunkTokens) : 0;
}

/// o of a sequence that is padding.
template <int kSlab>
FLASHQLA_DEVICE void zero_output(const ChunkForwardParams& p, const AdvanceWork& work) {
  const int left = p.dim_v - work.first_v, columns = left < kSlab ? left : kSlab;
  for (std::int64_t at = threadIdx.x; at < work.rows.length * columns; at += blockDim.x) {
    const std::int64_t row = work.rows.begin + at / columns;
    store_scalar(p.o.data, p.o.dtype, offset_of(p.o, work.rows.batch, row, work.head) + work.first_v + at % columns, 0.0f);
  }
}

FLASHQLA_DEVICE std::int64_t element_of(const StateTensor& x, std::int64_t row, std::int64_t head, int k, int v) {
  const std::int64_t first = row * x.stride_row + head * x.stride_head;
  return first + (x.value_first != 0 ? v * x.stride_outer + k : k * x.stride_outer + v);
}

/// The rows of states that the block's sequence reads and writes, -1 for none.
struct StateRows {
  std::int64_t read, write;
  bool padding;
};
FLASHQLA_DEVICE StateRows state_rows(const ChunkForwardParams& p, const AdvanceWork& work) {
  StateRows rows{-1, -1, false};
  if (p.initial_state.data != nullptr) rows.read = p.read.data != nullptr ? load_index(p.read, work.sequence) : work.sequence;
  if (p.final_state.data != nullptr) rows.write = p.write.data != nullptr ? load_index(p.write, work.sequence) : work.sequence;
  rows.padding = p.read.data != nullptr && p.write.data != nullptr && rows.read < 0 && rows.write < 0;
  return rows;
}

/// States asked for besides the last: before every chunk, or after every `states_every` chunks. They are written by
/// save(tensor, row); a row that does not exist is for save to leave out.
struct StateStore {
  std::int64_t place;
  std::int64_t until;  // chunks until the next one, with StoredStates::every

  FLASHQLA_DEVICE StateStore(const ChunkForwardParams& p, const AdvanceWork& work) : place(work.rows.first_chunk), until(0) {
    if (p.stored_states != StoredStates::every) return;
    place = p.stored_begin[work.sequence];
    until = p.states_every - p.stored_phase[work.sequence];
  }
  template <class Save>
  FLASHQLA_DEVICE void store(const ChunkForwardParams& p, const Save& save) {
    std::int64_t row = place;
    if (p.stored_rows.data != nullptr) row = place < p.stored_rows.size_0 ? load_index(p.stored_rows, place) : -1;
    save(p.stored, row);
    ++place;
  }
  template <class Save>
  FLASHQLA_DEVICE void before(const ChunkForwardParams& p, const Save& save) {
    if (p.stored_states == StoredStates::before_chunks) store(p, save);
  }
  template <class Save>
  FLASHQLA_DEVICE void after(const ChunkForwardParams& p, const AdvanceWork& work, std::int64_t chunk, const Save& save) {
    if (p.stored_states != StoredStates::every) return;
    const bool whole = (work.rows.shift + work.rows.position(chunk) + work.rows.tokens(chunk)) % kChunkTokens == 0;
    if (!whole || --until > 0) return;
    until = p.states_every;
    store(p, save);
  }
};

}  // namespace flashqla::cuda
