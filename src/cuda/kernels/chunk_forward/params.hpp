// What the kernels of chunk_forward receive, and the layout of what the first leaves for the second.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/host/tensor_map.hpp"
#include "cuda/views/views.hpp"
#include "flashqla/problem.hpp"

namespace flashqla::cuda {

/// Of one chunk and value head, written by prepare_chunks and read by advance_states. A block is 16 x 16 elements in the order of
/// tile::FragmentB, f16, 16 bytes a lane; blocks (row block, column block) of a lower triangle are numbered row by row. For WGMMA
/// (ChunkForwardParams::pieces) a triangle is rows of pieces of 8 x 8 elements, each 128 bytes, two rows of pieces as long as the
/// blocks of 16 are.
struct ChunkUnit {
  static constexpr int kBlocks = 10;
  static constexpr int kTriangleBytes = kBlocks * 512;
  static constexpr int kFactors = 64;
  // Bytes from the unit's start.
  static constexpr int kSolve = 0;                         // e = solve E, E = strength o v - read_k o (K S)
  static constexpr int kAnswers = kTriangleBytes;          // scores solve: O = read_q o (Q S) + rise o (answers E)
  static constexpr int kStrength = 2 * kTriangleBytes;     // f32 [64]: 1, with growth 2^-h (HeadGates)
  static constexpr int kReadK = kStrength + 4 * kFactors;  // strength, decay since the chunk's start, key's factor
  static constexpr int kReadQ = kReadK + 4 * kFactors;     // scale times that decay and the query's factor
  static constexpr int kRise =
      kReadQ + 4 * kFactors;  // a power of two: what rows of scores have been divided by, with growth times 2^h
  static constexpr int kWriteK = kRise + 4 * kFactors;   // beta, decay to the chunk's end, key's factor, with growth times 2^h
  static constexpr int kTotal = kWriteK + 4 * kFactors;  // f32: decay of the whole chunk
  static constexpr int kPrecise = kTotal + 4;            // f32: not 0 where K S needs more than the rounded state
  // f32: what has to get through the chunk of its tokens' largest error, to its end and (of gradients) to its start, or it is
  // walked token by token; 0 where decays are so weak that enough does.
  static constexpr int kLeastForth = kPrecise + 4, kLeastBack = kLeastForth + 4;
  // f32: likewise of the state's largest element, where a factor may be no normal number; else 0.
  static constexpr int kLeastOfState = kLeastBack + 4;
  static constexpr int kGrowth = kLeastOfState + 4;  // f32: not 0 where strengths are not all 1
  static constexpr int kBytes = (kGrowth + 4 + 63) / 64 * 64;
};

/// The same for f32: everything in f32, triangles as tile::triangle_row has them. Places are in floats.
struct FloatUnit {
  static constexpr int kTriangle = 10 * 256, kFactors = 64;
  static constexpr int kSolve = 0;                   // e = solve (v - read_k o (K S))
  static constexpr int kScores = kTriangle;          // O = read_q o (Q S) + scores e
  static constexpr int kReadK = 2 * kTriangle;       // [64]: decay since the chunk's start, key's factor
  static constexpr int kReadQ = kReadK + kFactors;   // scale times that decay and the query's factor
  static constexpr int kWriteK = kReadQ + kFactors;  // beta, decay to the chunk's end, key's factor
  static constexpr int kTotal = kWriteK + kFactors;  // decay of the whole chunk
  static constexpr int kLargest = kTotal + 1;        // block::largest_kept
  static constexpr int kFloats = (kLargest + 1 + 15) / 16 * 16;
};

/// Of one chunk and value head, [64] each: the sum of the log2 decays up to and with each token, in two parts, and beta.
struct KeptGates {
  float high[64], low[64], beta[64];
};

/// What chunk_backward wants of every chunk: blocks of 16 x 16 f16 in the order of a fragment, 16 bytes a lane, divided by powers
/// of two whose logarithms are beside. Null: nothing.
struct KeptChunks {
  std::byte* states = nullptr;           // [chunk][Hv][V / 16][K / 16]: S or its gradient as tile::FragmentB, B[v][k]
  std::int16_t* state_powers = nullptr;  // [chunk][Hv][V / 16][4]: of a quarter of the padded K
  std::byte* rows = nullptr;             // [chunk][Hv][4][V / 16]: errors or their gradients as tile::FragmentA, A[token][v]
  std::int16_t* row_powers = nullptr;    // [chunk][Hv][4][V / 16]: of 16 tokens, marked: row_log
  KeptGates* gates = nullptr;            // [chunk][Hv], from prepare_chunks
  // 2^11 times what rounding left of states and rows, f16 in the order of accumulators (kKeepsRests). Null: not kept.
  std::byte *state_rests = nullptr, *row_rests = nullptr;
};

struct ChunkForwardParams : OperationParams {
  SequenceTable sequences;
  std::int32_t stages;   // of advance_states: 1 or 2
  std::int32_t aligned;  // every row of q, k, v and o begins at a multiple of 16 bytes
  StateTensor initial_state, final_state, stored;
  IndexTensor read, write, stored_rows;
  StoredStates stored_states;
  std::int64_t states_every;         // chunks. With StoredStates::every:
  const std::int64_t* stored_begin;  // [sequences]: place of a sequence's first stored state
  const std::int64_t* stored_phase;  // [sequences]: chunks of its prefix since the last stored state
  std::byte* units;                  // [chunk][Hv] ChunkUnit, or FloatUnit
  std::int32_t pieces;               // how triangles of ChunkUnit lie
  KeptChunks kept;                   // the state before every chunk, and e
  StateTensor kept_states;           // f32: the state before every chunk, a row each
  TokenTensor kept_errors;           // f32: e, a chunk a batch entry
  TokenTensor g_cumulative, a;       // write_extras
};

/// Of q, k, v and o [B,T,H,D] for boxes of 64 tokens by 64 columns of one head.
struct ChunkForwardMaps {
  TensorMap q, k, v, o;
};

}  // namespace flashqla::cuda
