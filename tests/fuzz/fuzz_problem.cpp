// libFuzzer target: one call of one operation from the input bytes. A call starts out valid; a few arguments (descriptor fields,
// ranks, sizes, strides, dtypes, addresses, offsets, rows) are then spoilt. It must either throw one of the library's exceptions,
// with nothing written, or run inside its buffers, under every implementation of this processor.
#include <fuzzer/FuzzedDataProvider.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "arena.hpp"
#include "common/saved.hpp"
#include "dispatch/implementation.hpp"
#include "flashqla/flashqla.hpp"

namespace flashqla::fuzz {
namespace {

constexpr std::size_t kMaxWorkspace = std::size_t{1} << 27;

class Caller {
 public:
  Caller(const std::uint8_t* data, std::size_t size)
      : bytes_(data, size), random_(bytes_.ConsumeIntegral<std::uint32_t>()), arena_(random_()) {}

  void call() {
    force_implementation();
    switch (pick(0, 2)) {
      case 0:
        return forward();
      case 1:
        return backward();
      default:
        return recurrent();
    }
  }

 private:
  /// From the input while it lasts, then from a generator that its first bytes have seeded: short inputs make whole calls, too.
  std::int64_t pick(std::int64_t low, std::int64_t high) {
    if (high <= low) return low;
    if (bytes_.remaining_bytes() > 0) return bytes_.ConsumeIntegralInRange<std::int64_t>(low, high);
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool one_in(std::int64_t n) { return pick(1, n) == n; }
  std::int64_t anything() { return pick(INT64_MIN, INT64_MAX); }

  void force_implementation() {
    const auto table = detail::implementations();
    const auto choice = static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(table.size())));
    if (choice == table.size()) {
      unsetenv("FLASHQLA_IMPL");
    } else {
      setenv("FLASHQLA_IMPL", table[choice]->name, 1);
    }
  }

  /// Mostly small; now and then something no tensor can have.
  std::int64_t size(std::int64_t low, std::int64_t high) {
    constexpr std::int64_t kStrange[] = {-1, 0, INT64_MIN, INT64_MAX, std::int64_t{1} << 32, std::int64_t{1} << 56};
    return one_in(200) ? kStrange[pick(0, 5)] : pick(low, high);
  }
  template <class Enum>
  Enum enumerator(Enum last) {
    return static_cast<Enum>(one_in(200) ? pick(0, 255) : pick(0, static_cast<std::int64_t>(last)));
  }
  DType float_type() { return static_cast<DType>(one_in(100) ? pick(0, 255) : pick(1, 3)); }

  Problem problem() {
    Problem p;
    p.packed = pick(0, 1) != 0;
    p.batch = p.packed && !one_in(50) ? 1 : size(0, 3);
    p.heads_qk = size(1, 3);
    p.heads_v = one_in(100) ? size(0, 7) : (p.heads_qk > 0 && p.heads_qk < 8 ? p.heads_qk * pick(1, 3) : 1);
    p.dim_k = one_in(8) ? size(1, 257) : size(1, 40);
    p.dim_v = one_in(8) ? size(1, 257) : size(1, 40);
    p.tokens = one_in(4) && p.dim_k <= 40 && p.dim_v <= 40 ? size(0, 200) : size(0, 20);  // keeps the reference fast
    p.dtype = static_cast<DType>(one_in(200) ? pick(0, 255) : pick(0, 3));
    p.num_sequences = p.packed ? size(0, 5) : -1;
    if (one_in(100)) p.num_sequences = size(-1, 4);
    p.gate = enumerator(Gate::cumulative);
    p.beta = enumerator(Beta::doubled_sigmoid);
    p.qk_l2norm = pick(0, 1) != 0;
    p.state_layout = enumerator(StateLayout::value_key);
    if (pick(0, 3) == 0) p.scale = static_cast<double>(pick(-20, 20)) / 8.0;
    if (one_in(100)) p.scale = std::bit_cast<double>(anything());
    if (one_in(100)) p.l2norm_eps = std::bit_cast<double>(anything());
    return p;
  }

  /// A tensor of such sizes, perhaps spoilt. Absent when its memory would be too large.
  TensorView tensor(DType dtype, std::initializer_list<std::int64_t> sizes) {
    std::int64_t count = 1;
    for (const std::int64_t s : sizes) {
      if (s < 0 || s > kMaxBlockBytes) return {};
      if (__builtin_mul_overflow(count, s, &count) || count > kMaxBlockBytes) return {};
    }
    TensorView view(nullptr, dtype, sizes);
    std::size_t shift = 0;
    while (one_in(60)) {
      const auto d = static_cast<std::size_t>(pick(0, kMaxRank - 1));
      switch (pick(0, 6)) {
        case 0:
          view.sizes[d] = size(0, 6);
          break;
        case 1:
          view.strides[d] = one_in(4) ? anything() : pick(-300, 300);
          break;
        case 2:
          view.dtype = static_cast<DType>(pick(0, 5));
          break;
        case 3:
          view.rank = static_cast<int>(one_in(4) ? pick(-100, 100) : pick(0, kMaxRank));
          break;
        case 4:
          shift = static_cast<std::size_t>(pick(0, 15));
          break;
        case 5:
          for (std::size_t i = 0; i < d; ++i)
            view.strides[i] += view.strides[i] < 1000 && view.strides[i] > -1000 ? view.strides[i] : 0;
          break;
        default:
          std::swap(view.sizes[d], view.sizes[d / 2]);
          std::swap(view.strides[d], view.strides[d / 2]);
      }
    }
    if (static_cast<unsigned>(view.dtype) > static_cast<unsigned>(DType::i32) || !arena_.allocate(view, shift)) return {};
    if (view.data != nullptr) views_.push_back(view);
    return view;
  }
  TensorView optional(DType dtype, std::initializer_list<std::int64_t> sizes) {
    return pick(0, 2) != 0 ? tensor(dtype, sizes) : TensorView{};
  }

  /// An output; now and then over the memory of another tensor.
  TensorView output(DType dtype, std::initializer_list<std::int64_t> sizes) {
    TensorView view = tensor(dtype, sizes);
    if (view.data != nullptr && one_in(60)) {
      for (const TensorView& other : views_) {
        if (other.dtype == view.dtype && other.sizes == view.sizes && other.strides == view.strides && other.data != view.data) {
          view.data = other.data;
          break;
        }
      }
    }
    return view;
  }

  TensorView indices(std::initializer_list<std::int64_t> sizes, std::int64_t low, std::int64_t high) {
    TensorView view = tensor(pick(0, 1) != 0 ? DType::i64 : DType::i32, sizes);
    for_each_index(view, [&] { return one_in(100) ? anything() : pick(low, high); });
    return view;
  }

  /// Sets each element of a contiguous integer tensor.
  template <class Next>
  void for_each_index(const TensorView& view, Next&& next) {
    if (view.data == nullptr || (view.dtype != DType::i64 && view.dtype != DType::i32)) return;
    if (reinterpret_cast<std::uintptr_t>(view.data) % 8 != 0) return;
    std::int64_t count = 1;
    for (int d = view.rank - 1; d >= 0; --d) {
      const auto i = static_cast<std::size_t>(d);
      if (view.strides[i] != count) return;
      count *= view.sizes[i];
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t value = next();
      if (view.dtype == DType::i64) static_cast<std::int64_t*>(view.data)[i] = value;
      if (view.dtype == DType::i32) static_cast<std::int32_t*>(view.data)[i] = static_cast<std::int32_t>(value);
    }
  }

  InputTensors inputs(const Problem& p) {
    InputTensors t;
    const auto small = [&] { return p.dtype == DType::f64 && pick(0, 1) != 0 ? DType::f64 : float_type(); };
    t.q = tensor(p.dtype, {p.batch, p.tokens, p.heads_qk, p.dim_k});
    t.k = tensor(p.dtype, {p.batch, p.tokens, p.heads_qk, p.dim_k});
    t.v = tensor(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
    const DType gate = p.gate == Gate::cumulative && !one_in(20) ? DType::f32 : small();
    if (p.gate != Gate::none || one_in(50)) t.g = tensor(gate, {p.batch, p.tokens, p.heads_v});
    if (p.beta != Beta::one || one_in(50)) t.beta = tensor(small(), {p.batch, p.tokens, p.heads_v});
    if (p.gate == Gate::computed || one_in(50)) t.a_log = tensor(small(), {p.heads_v});
    if (p.gate == Gate::computed || one_in(50)) t.dt_bias = optional(small(), {p.heads_v});
    if (p.packed || one_in(50)) t.cu_seqlens = offsets(p);
    return t;
  }

  TensorView offsets(const Problem& p) {
    const std::int64_t sequences = p.sequences();
    if (sequences < 0 || sequences > 100) return {};
    TensorView view = tensor(pick(0, 1) != 0 ? DType::i64 : DType::i32, {sequences + 1});
    std::int64_t offset = 0;
    for_each_index(view, [&] {
      const std::int64_t value = offset;
      const std::int64_t left = p.tokens > offset && p.tokens < 1000 ? p.tokens - offset : 0;
      offset += one_in(100) ? pick(-300, 300) : pick(0, left);
      return one_in(200) ? anything() : value;
    });
    return view;
  }

  /// What a forward leaves for a backward, which may be of anything: numbers alone, or with a head that some forward has written.
  TensorView saved(const Problem& p) {
    std::int64_t count = pick(0, 300);
    try {
      if (!one_in(20)) count = saved_elements(ChunkForward{p});
    } catch (const Error&) {
    }
    TensorView view = output(DType::f32, {count});
    constexpr std::uint64_t kLayouts[] = {0, 1, 4, 8, 16};
    const bool whole = view.data != nullptr && view.rank == 1 && view.dtype == DType::f32 && view.strides[0] == 1 &&
                       view.sizes[0] >= SavedShape::kHead && reinterpret_cast<std::uintptr_t>(view.data) % alignof(float) == 0;
    if (whole && !one_in(8)) SavedHead::write(static_cast<float*>(view.data), kLayouts[pick(0, 4)]);
    return view;
  }

  TensorView state(const Problem& p, std::int64_t rows, DType dtype) {
    return p.state_layout == StateLayout::key_value ? output(dtype, {rows, p.heads_v, p.dim_k, p.dim_v})
                                                    : output(dtype, {rows, p.heads_v, p.dim_v, p.dim_k});
  }

  StateTensors states(const Problem& p, std::int64_t max_drafts) {
    StateTensors t;
    const std::int64_t sequences = p.sequences(), slots = pick(0, 8);
    const bool pooled_read = pick(0, 1) != 0, pooled_write = pick(0, 1) != 0;
    if (pick(0, 2) != 0) t.initial_state = state(p, pooled_read ? slots : sequences, float_type());
    if (pick(0, 3) != 0) t.final_state = state(p, pooled_write ? slots : sequences, pooled_write ? float_type() : DType::f32);
    if (pooled_read && pooled_write && pick(0, 1) != 0) {
      t.final_state = {const_cast<void*>(t.initial_state.data), DType::f32, {}};
      t.final_state.dtype = t.initial_state.dtype;
      t.final_state.rank = t.initial_state.rank;
      t.final_state.sizes = t.initial_state.sizes;
      t.final_state.strides = t.initial_state.strides;
    }
    const std::int64_t drafts = max_drafts > 0 ? pick(0, max_drafts) : 0;
    if (pooled_read && (t.initial_state.present() || one_in(50))) {
      t.read = drafts > 0 ? indices({sequences, drafts}, -1, slots - 1) : indices({sequences}, -1, slots - 1);
      if (drafts > 0 || one_in(50)) t.accepted = indices({sequences}, 1, drafts);
    }
    if (pooled_write && (t.final_state.present() || one_in(50))) t.write = indices({sequences}, -1, slots - 1);
    return t;
  }

  void forward() {
    ChunkForward d;
    d.problem = problem();
    d.stored_states = enumerator(StoredStates::every);
    if (d.stored_states == StoredStates::every) d.states_every = one_in(50) ? size(0, 300) : 64 * pick(1, 2);
    const Problem& p = d.problem;
    ChunkForwardTensors t;
    t.inputs = inputs(p);
    t.states = states(p, one_in(50) ? 2 : 0);
    t.o = output(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
    if (d.stored_states != StoredStates::none || one_in(50)) {
      const std::int64_t rows = pick(0, 12);
      t.stored = state(p, rows, float_type());
      if (t.states.final_state.present() && one_in(8)) t.stored = t.states.final_state;
      if (d.stored_states == StoredStates::every && pick(0, 1) != 0) {
        t.prefix_lengths = pick(0, 1) != 0 ? indices({p.sequences()}, 0, 200) : TensorView{};
        std::int64_t count = pick(0, 6);
        try {
          count = num_stored_states(d, t.inputs.cu_seqlens, t.prefix_lengths);
        } catch (const Error&) {
          count = pick(0, 6);
        }
        t.stored_rows = indices({count}, -1, rows - 1);
      }
    }
    t.g_cumulative = pick(0, 3) == 0 ? output(DType::f32, {p.batch, p.tokens, p.heads_v}) : TensorView{};
    t.a = pick(0, 3) == 0 ? output(p.dtype, {p.batch, p.tokens, p.heads_v, kTokensPerChunk}) : TensorView{};
    t.saved = pick(0, 3) == 0 ? saved(p) : TensorView{};
    attempt(d, t);
  }

  void backward() {
    ChunkBackward d;
    d.problem = problem();
    d.max_sequence_tokens = one_in(4) ? size(-1, 200) : -1;
    const Problem& p = d.problem;
    ChunkBackwardTensors t;
    t.inputs = inputs(p);
    const auto gradient = [&](DType own, std::initializer_list<std::int64_t> sizes) {
      return pick(0, 7) != 0 ? output(pick(0, 3) == 0 ? DType::f32 : own, sizes) : TensorView{};
    };
    t.initial_state = pick(0, 1) != 0 ? state(p, p.sequences(), float_type()) : TensorView{};
    t.d_o = pick(0, 7) != 0 ? tensor(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v}) : TensorView{};
    t.d_final_state = pick(0, 1) != 0 ? state(p, p.sequences(), float_type()) : TensorView{};
    t.d_q = gradient(p.dtype, {p.batch, p.tokens, p.heads_qk, p.dim_k});
    t.d_k = gradient(p.dtype, {p.batch, p.tokens, p.heads_qk, p.dim_k});
    t.d_v = gradient(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
    if (p.gate != Gate::none || one_in(50)) t.d_g = gradient(t.inputs.g.dtype, {p.batch, p.tokens, p.heads_v});
    if (p.beta != Beta::one || one_in(50)) t.d_beta = gradient(t.inputs.beta.dtype, {p.batch, p.tokens, p.heads_v});
    if (t.inputs.a_log.present() || one_in(50)) t.d_a_log = gradient(t.inputs.a_log.dtype, {p.heads_v});
    if (t.inputs.dt_bias.present() || one_in(50)) t.d_dt_bias = gradient(t.inputs.dt_bias.dtype, {p.heads_v});
    t.d_initial_state = pick(0, 1) != 0 ? state(p, p.sequences(), DType::f32) : TensorView{};
    t.saved = pick(0, 1) != 0 ? saved(p) : TensorView{};
    attempt(d, t);
  }

  void recurrent() {
    RecurrentForward d;
    d.problem = problem();
    const Problem& p = d.problem;
    RecurrentForwardTensors t;
    t.inputs = inputs(p);
    t.states = states(p, 3);
    t.o = output(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
    if (pick(0, 1) != 0 && p.tokens >= 0 && p.tokens < 300 && p.batch >= 0 && p.batch < 300) {
      const std::int64_t rows = pick(0, 1) != 0 ? p.batch * p.tokens : pick(0, 40);
      t.token_states = state(p, rows, float_type());
      if (t.states.final_state.present() && one_in(8)) t.token_states = t.states.final_state;
      if (pick(0, 1) != 0) t.token_rows = indices({p.batch, p.tokens}, -1, rows - 1);
    }
    attempt(d, t);
  }

  template <class Descriptor, class Tensors>
  void attempt(const Descriptor& descriptor, const Tensors& tensors) {
    const Parallel parallel = own_pool(static_cast<int>(pick(1, 3)));
    arena_.remember();
    try {
      const Plan<Descriptor> made = plan(descriptor, static_cast<int>(one_in(200) ? pick(-5, 100) : pick(1, 3)));
      if (made.workspace_bytes > kMaxWorkspace) return;
      const std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, (made.workspace_bytes + 63) / 64 * 64),
                                                             std::free);
      run(made, tensors, {workspace.get(), made.workspace_bytes}, parallel);
    } catch (const Error&) {
      if (!arena_.unchanged()) {
        std::fputs("a refused call has written\n", stderr);
        std::abort();
      }
    }
  }

  FuzzedDataProvider bytes_;
  std::mt19937_64 random_;
  Arena arena_;
  std::vector<TensorView> views_;
};

}  // namespace
}  // namespace flashqla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  flashqla::fuzz::Caller(data, size).call();
  return 0;
}
