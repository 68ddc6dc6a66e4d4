// Rows and units of the chunks on their way to the stages of a block that goes from chunk to chunk.
#pragma once

#include <cstddef>

#include "cuda/kernels/chunk_forward/shared.cuh"
#include "cuda/tile/rows.cuh"

namespace flashqla::cuda {

/// Copies of rows and units to the stages, chunk after chunk: the next one (kStep 1) or the one before (-1).
template <class Element, class Shared, int kStep>
struct StageLoader {
  static_assert(kStep == 1 || kStep == -1);
  static constexpr int kThreads = Copier<Shared, kStep>::kThreads, kDimK = Shared::Rows::kColumns;
  using Stage = typename Shared::Stage;
  using RowsCursor = tile::RowCursor<kThreads, kChunkTokens, kDimK>;
  using ValuesCursor = tile::RowCursor<kThreads, kChunkTokens, Shared::kSlab>;
  static constexpr int kKeysAt = offsetof(Stage, keys), kQueriesAt = offsetof(Stage, queries),
                       kValuesAt = offsetof(Stage, values), kUnitAt = offsetof(Stage, unit);
  Copier<Shared, kStep> copier;
  RowsCursor keys, queries;
  ValuesCursor values;
  const std::byte* unit;                      // this thread's first 16 bytes of the next chunk's
  std::int64_t unit_step;                     // bytes from chunk to chunk
  std::uint32_t rows_to, values_to, unit_to;  // in the first stage
  std::int32_t whole;                         // chunks up to here are copied directly: rows are aligned, nothing is past an end

  /// `value_rows`: rows of V to load beside keys and queries. `first`: the first chunk that is loaded.
  FLASHQLA_DEVICE StageLoader(const ChunkForwardParams& p, const AdvanceWork& work, const LanePlace& place,
                              const TokenTensor& value_rows, std::int64_t first, const Shared& shared)
      : copier(place),
        keys(first_of(p.k, work, work.head_qk, 0, first), p.k.stride_token, copier.thread),
        queries(first_of(p.q, work, work.head_qk, 0, first), p.q.stride_token, copier.thread),
        values(first_of(value_rows, work, work.head, work.first_v, first), value_rows.stride_token, copier.thread),
        whole(whole_chunks(p, work, p.dim_k == kDimK && work.first_v + Shared::kSlab <= p.dim_v)) {
    const std::uint32_t stages = ptx::shared_address(shared.stages), own = copier.thread * 16;
    rows_to = stages + kKeysAt + RowsCursor::place(copier.thread);
    values_to = stages + kValuesAt + ValuesCursor::place(copier.thread);
    unit_to = stages + kUnitAt + own;
    unit = p.units + ((work.rows.first_chunk + first) * p.heads_v + work.head) * ChunkUnit::kBytes + own;
    unit_step = std::int64_t{kStep} * p.heads_v * ChunkUnit::kBytes;
  }

  static FLASHQLA_DEVICE const Element* first_of(const TokenTensor& x, const AdvanceWork& work, std::int32_t head, int column,
                                                 std::int64_t chunk) {
    const std::int64_t row = work.rows.begin + chunk * kChunkTokens;  // direct copies are of sequences without a shift
    return static_cast<const Element*>(x.data) + offset_of(x, work.rows.batch, row, head) + column;
  }

  /// Starts the copies of the next chunk to stage `number`. Without 16-byte alignment rows go through the registers.
  FLASHQLA_DEVICE void load(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& value_rows,
                            std::int32_t chunk, Shared& shared, int number) {
    if (!copier.copies) return;
    const std::uint32_t stage = static_cast<std::uint32_t>(number) * sizeof(Stage);
    if (chunk < whole) {
      keys.copy(rows_to + stage);
      queries.copy(rows_to + stage + (kQueriesAt - kKeysAt));
      values.copy(values_to + stage);
    } else {
      load_part(p, work, value_rows, chunk, shared.stages[number], copier.thread);
      keys.move(1);
      queries.move(1);
      values.move(1);
    }
    if constexpr (kStep < 0) {
      keys.move(-2);
      queries.move(-2);
      values.move(-2);
    }
    constexpr int kPieces = ChunkUnit::kBytes / 16;
#pragma unroll
    for (int i = 0; i * kThreads < kPieces; ++i) {
      if ((i + 1) * kThreads > kPieces && i * kThreads + static_cast<int>(copier.thread) >= kPieces) break;
      ptx::cp_async_16(unit_to + stage + i * kThreads * 16, unit + i * kThreads * 16);
    }
    unit += unit_step;
  }

  static __device__ __noinline__ void load_part(const ChunkForwardParams& p, const AdvanceWork& work, const TokenTensor& values,
                                                std::int64_t chunk, typename Shared::Stage& stage, unsigned thread) {
    const std::int64_t token = work.rows.begin + work.rows.position(chunk);
    const int tokens = work.rows.tokens(chunk), columns_v = p.dim_v - work.first_v;
    const auto rows_of = [&](const TokenTensor& x, std::int32_t head, int first, int columns) {
      return tile::GlobalRows{static_cast<const Element*>(x.data) + offset_of(x, work.rows.batch, token, head) + first,
                              x.stride_token, tokens, columns};
    };
    const tile::GlobalRows key_rows = rows_of(p.k, work.head_qk, 0, p.dim_k), query_rows = rows_of(p.q, work.head_qk, 0, p.dim_k),
                           value_rows = rows_of(values, work.head, work.first_v, columns_v);
    if (p.aligned != 0) {
      tile::copy_rows_async<kThreads>(typename Shared::Rows{ptx::shared_address(stage.keys)}, key_rows, thread);
      tile::copy_rows_async<kThreads>(typename Shared::Rows{ptx::shared_address(stage.queries)}, query_rows, thread);
      tile::copy_rows_async<kThreads>(typename Shared::Values{ptx::shared_address(stage.values)}, value_rows, thread);
    } else {
      tile::copy_rows<kThreads, kChunkTokens, kDimK>(stage.keys, key_rows, thread);
      tile::copy_rows<kThreads, kChunkTokens, kDimK>(stage.queries, query_rows, thread);
      tile::copy_rows<kThreads, kChunkTokens, Shared::kSlab>(stage.values, value_rows, thread);
    }
  }
};

}  // namespace flashqla::cuda
