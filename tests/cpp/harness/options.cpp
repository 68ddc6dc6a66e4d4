#include "harness/options.hpp"

namespace flashqla::test {

namespace {

Option dtypes() {
  return {[](Case& c) { c.dtype = DType::f32; }, [](Case& c) { c.dtype = DType::bf16; }, [](Case& c) { c.dtype = DType::f16; }};
}
Option gate_dtypes() {
  return {[](Case& c) { c.gate_dtype = DType::f32; }, [](Case& c) { c.gate_dtype = DType::bf16; },
          [](Case& c) { c.gate_dtype = DType::f16; }};
}
Option state_dtypes() {
  return {[](Case& c) { c.state_dtype = DType::f32; }, [](Case& c) { c.state_dtype = DType::bf16; },
          [](Case& c) { c.state_dtype = DType::f16; }};
}
Option index_dtypes() {
  return {[](Case& c) { c.index_dtype = DType::i64; }, [](Case& c) { c.index_dtype = DType::i32; }};
}
Option layouts() {
  return {[](Case& c) { c.layout = StateLayout::key_value; }, [](Case& c) { c.layout = StateLayout::value_key; }};
}
Option gates() {
  return {[](Case& c) { c.gate = Gate::log_decay; }, [](Case& c) { c.gate = Gate::none; },
          [](Case& c) { c.gate = Gate::computed; },
          [](Case& c) {
            c.gate = Gate::computed;
            c.dt_bias = false;
          }};
}
Option betas() {
  return {[](Case& c) { c.beta = Beta::given; }, [](Case& c) { c.beta = Beta::one; }, [](Case& c) { c.beta = Beta::sigmoid; },
          [](Case& c) { c.beta = Beta::doubled_sigmoid; }};
}
Option scales() {
  return {[](Case&) {}, [](Case& c) { c.scale = 0.5; }, [](Case& c) { c.scale = 0.0; }, [](Case& c) { c.scale = -2.0; }};
}
Option norms() {
  return {[](Case& c) { c.l2norm = false; }, [](Case& c) { c.l2norm = true; }};
}
Option groups() {
  const auto heads = [](std::int64_t Hq, std::int64_t group) {
    return [=](Case& c) {
      c.Hq = Hq;
      c.Hv = Hq * group;
    };
  };
  return {heads(2, 1), heads(1, 2), heads(2, 3), heads(1, 4), heads(1, 8)};
}
Option sizes() {
  const auto dims = [](std::int64_t K, std::int64_t V) {
    return [=](Case& c) {
      c.K = K;
      c.V = V;
    };
  };
  return {dims(16, 16), dims(32, 16), dims(16, 48), dims(24, 8), dims(5, 7), dims(64, 64)};
}
Option shapes() {
  const auto packed = [](std::vector<std::int64_t> lengths, std::int64_t slack) {
    return [=](Case& c) {
      c.lengths = lengths;
      c.slack = slack;
    };
  };
  Option shapes{packed({40, 0, 24, 0, 130, 64, 1}, 0), packed({0, 65, 0}, 9), packed({7, 64, 200}, 130)};
  shapes.push_back([](Case& c) { c.T = 70; });
  shapes.push_back([](Case& c) {
    c.B = 3;
    c.T = 33;
  });
  return shapes;
}
Option strides() {
  Option settings;
  for (Strides style :
       {Strides::dense, Strides::padded, Strides::transposed, Strides::fused, Strides::expanded, Strides::reversed}) {
    settings.push_back([style](Case& c) { c.strides = style; });
  }
  return settings;
}
Option data() {
  Option settings;
  for (Data kind : {Data::usual, Data::strong_decay, Data::no_decay, Data::growth, Data::forget, Data::beta_zero, Data::beta_two,
                    Data::repeated_keys, Data::unnormalised}) {
    settings.push_back([kind](Case& c) { c.data = kind; });
  }
  return settings;
}
Option pools() {
  return {[](Case& c) { c.pool = Pool::none; },
          [](Case& c) {
            c.pool = Pool::none;
            c.initial = true;
          },
          [](Case& c) {
            c.pool = Pool::none;
            c.initial = true;
            c.final = false;
          },
          [](Case& c) { c.pool = Pool::separate; }, [](Case& c) { c.pool = Pool::in_place; }};
}

}  // namespace

std::vector<Option> forward_options() {
  const Option stored{[](Case&) {},
                      [](Case& c) { c.stored = StoredStates::before_chunks; },
                      [](Case& c) {
                        c.stored = StoredStates::every;
                        c.states_every = 64;
                      },
                      [](Case& c) {
                        c.stored = StoredStates::every;
                        c.states_every = 128;
                        c.stored_rows = true;
                      },
                      [](Case& c) {
                        c.stored = StoredStates::every;
                        c.states_every = 64;
                        c.prefix = true;
                      },
                      [](Case& c) {
                        c.stored = StoredStates::every;
                        c.states_every = 64;
                        c.prefix = c.stored_rows = true;
                      }};
  const Option extras{[](Case& c) { c.extras = false; }, [](Case& c) { c.extras = true; }};
  return {dtypes(), gate_dtypes(), state_dtypes(), index_dtypes(), layouts(), gates(), betas(), scales(), norms(),
          groups(), sizes(),       shapes(),       strides(),      data(),    pools(), stored,  extras};
}

std::vector<Option> backward_options() {
  const Option initial{[](Case& c) { c.initial = false; }, [](Case& c) { c.initial = true; }};
  const Option gradients{[](Case& c) { c.d_final = false; }, [](Case& c) { c.d_final = true; },
                         [](Case& c) {
                           c.d_o = false;
                           c.d_final = true;
                         },
                         [](Case& c) { c.ones = true; }};
  const Option wide{[](Case& c) { c.f32_gradients = false; }, [](Case& c) { c.f32_gradients = true; }};
  const Option saved{[](Case& c) { c.saved = false; }, [](Case& c) { c.saved = c.gate != Gate::cumulative; }};
  Option all_gates = gates();
  all_gates.push_back([](Case& c) { c.gate = Gate::cumulative; });
  return {dtypes(), gate_dtypes(), state_dtypes(), index_dtypes(), layouts(), all_gates, betas(),   scales(), norms(),
          groups(), sizes(),       shapes(),       strides(),      data(),    initial,   gradients, wide,     saved};
}

std::vector<Option> recurrent_options() {
  const auto packed = [](std::vector<std::int64_t> lengths, std::int64_t slack) {
    return [=](Case& c) {
      c.lengths = lengths;
      c.slack = slack;
    };
  };
  const auto batch = [](std::int64_t B, std::int64_t T) {
    return [=](Case& c) {
      c.B = B;
      c.T = T;
    };
  };
  const Option shapes{batch(1, 1), batch(5, 1), batch(4, 3), packed({1, 1, 1, 1, 1}, 0), packed({3, 0, 2, 5}, 2), batch(2, 17)};
  const Option drafts{[](Case& c) { c.drafts = 0; }, [](Case& c) { c.drafts = c.pool == Pool::none ? 0 : 1; },
                      [](Case& c) { c.drafts = c.pool == Pool::none ? 0 : 3; }};
  const Option states{[](Case& c) { c.token_states = false; }, [](Case& c) { c.token_states = true; },
                      [](Case& c) { c.token_states = c.token_rows = true; }};
  return {dtypes(), gate_dtypes(), state_dtypes(), index_dtypes(), layouts(), gates(), betas(), scales(), norms(),
          groups(), sizes(),       shapes,         strides(),      data(),    pools(), drafts,  states};
}

}  // namespace flashqla::test
