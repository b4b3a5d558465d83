//! Checks of a shape, whatever it was read from: a run file, a `config.json` or the manifest of a checkpoint. Must pass
//! before any list of blocks or tensors is built from the shape.

use super::{Family, Shape};

/// Largest valid size. Products of a few such numbers stay far from overflow.
pub const MAX_SIZE: usize = 1_000_000_000;

/// Maximum number of heads, because layouts are checked against every number below it.
const MAX_HEADS: usize = 10_000_000;

/// Maximum number of parameters, so that no later calculation overflows.
const MAX_PARAMETERS: f64 = 1e15;

/// Maximum number of tensors, because every rank lists them. DeepSeek-V3 has 46,000.
const MAX_TENSORS: f64 = 200_000.0;

/// Maximum capacity factor. An expert without a limit takes at most `experts / top_k` times its share.
const MAX_CAPACITY: f64 = 1000.0;

/// An invalid field of a shape.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShapeError {
    /// Keys of `[model]` that may be the cause, the most likely one first.
    pub keys: Vec<&'static str>,
    /// The problem with its values: `top_k=3 is more than experts=2`.
    pub message: String,
    /// How to fix it; may be empty.
    pub suggestion: String,
}

impl std::fmt::Display for ShapeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        if self.suggestion.is_empty() { Ok(()) } else { write!(f, "; {}", self.suggestion) }
    }
}

impl Shape {
    /// All invalid fields.
    pub fn errors(&self) -> Vec<ShapeError> {
        let mut found = Found(Vec::new());
        found.sizes(self);
        found.heads(self);
        if found.0.is_empty() {
            found.totals(self);
        }
        found.numbers(self);
        found.0
    }
}

struct Found(Vec<ShapeError>);

impl Found {
    fn add(&mut self, keys: &[&'static str], message: String, suggestion: impl Into<String>) {
        let (keys, suggestion) = (keys.to_vec(), suggestion.into());
        self.0.push(ShapeError { keys, message, suggestion });
    }

    /// Adds the error `{key} must {expected} (got {value})` unless `valid`.
    fn require(
        &mut self,
        valid: bool,
        key: &'static str,
        value: impl std::fmt::Display,
        expected: &str,
    ) {
        if !valid {
            let name = key.rsplit('.').next().unwrap_or(key);
            self.add(&[key], format!("{name} must {expected} (got {value})"), "");
        }
    }

    fn sizes(&mut self, shape: &Shape) {
        let mut sizes = vec![
            ("dim", shape.dim),
            ("layers", shape.layers),
            ("heads", shape.heads),
            ("kv_heads", shape.kv_heads),
            ("ffn", shape.ffn),
            ("vocab", shape.vocab),
            ("seq", shape.seq),
        ];
        if let Some(moe) = shape.moe {
            sizes.extend([("experts", moe.experts), ("top_k", moe.top_k)]);
            sizes.extend((moe.shared > 0).then_some(("shared_experts", moe.shared)));
        }
        if let Some(latent) = shape.latent {
            sizes.extend([("kv_lora_rank", latent.kv_rank), ("nope_head_dim", latent.nope)]);
            sizes.extend([("rope_head_dim", latent.rope), ("v_head_dim", latent.value)]);
            sizes.extend(latent.q_rank.map(|rank| ("q_lora_rank", rank)));
        }
        sizes.extend(shape.lead.map(|lead| ("dense_ffn", lead.ffn)));
        sizes.extend(
            shape.rope_scaling.map(|scaling| ("rope_scaling.original_seq", scaling.original_seq)),
        );
        for (key, size) in sizes {
            let most = if key.ends_with("heads") { MAX_HEADS } else { MAX_SIZE };
            self.require(size >= 1, key, size, "be a positive integer");
            self.require(size <= most, key, size, &format!("be at most {most}"));
        }
    }

    fn heads(&mut self, shape: &Shape) {
        let Shape { dim, heads, kv_heads, head_dim, .. } = *shape;
        if dim == 0 || [heads, kv_heads].iter().any(|count| !(1..=MAX_HEADS).contains(count)) {
            return;
        }
        if head_dim == 0 {
            self.require(false, "head_dim", head_dim, "be a positive integer");
        } else if head_dim > MAX_SIZE {
            self.require(false, "head_dim", head_dim, &format!("be at most {MAX_SIZE}"));
        } else if shape.family != Family::Gpt2 && head_dim % 2 == 1 {
            let message = format!("head_dim={head_dim} is odd, but rotary positions rotate pairs");
            self.add(&["head_dim", "heads", "dim"], message, "use an even head_dim");
        }
        if !heads.is_multiple_of(kv_heads) {
            let message = format!("kv_heads={kv_heads} does not divide heads={heads}");
            let suggestion = format!("use {}", crate::resolve::near::divisors(kv_heads, heads));
            self.add(&["kv_heads", "heads"], message, suggestion);
        }
    }

    fn numbers(&mut self, shape: &Shape) {
        let Shape { norm_eps, dropout, rope_theta, .. } = *shape;
        self.require(norm_eps > 0.0, "norm_eps", norm_eps, "be greater than 0");
        let probability = (0.0..1.0).contains(&dropout);
        self.require(probability, "dropout", dropout, "be at least 0 and less than 1");
        self.require(rope_theta > 1.0, "rope_theta", rope_theta, "be greater than 1");
        if let Some(scaling) = shape.rope_scaling {
            let factor = scaling.factor;
            self.require(factor > 0.0, "rope_scaling.factor", factor, "be greater than 0");
            let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
            if !(0.0 < low && low < high) {
                let keys = ["rope_scaling.low_freq_factor", "rope_scaling.high_freq_factor"];
                let message = format!(
                    "low_freq_factor={low} and high_freq_factor={high} do not form a range"
                );
                self.add(&keys, message, "use 0 < low_freq_factor < high_freq_factor");
            }
        }
        if let Some(lead) = shape.lead.filter(|lead| lead.layers > shape.layers) {
            let message =
                format!("dense_layers={} is more than layers={}", lead.layers, shape.layers);
            let suggestion = format!("use at most {}", shape.layers);
            self.add(&["dense_layers", "layers"], message, suggestion);
        }
        let Some(moe) = shape.moe else { return };
        if moe.top_k > moe.experts && moe.experts > 0 {
            let message = format!("top_k={} is more than experts={}", moe.top_k, moe.experts);
            self.add(&["top_k", "experts"], message, format!("use at most {}", moe.experts));
        }
        if let Some(capacity) = moe.capacity {
            let expected = "be greater than 0, or removed for dropless routing";
            self.require(capacity > 0.0, "capacity", capacity, expected);
            let expected = format!("be at most {MAX_CAPACITY}, or removed for dropless routing");
            self.require(capacity <= MAX_CAPACITY, "capacity", capacity, &expected);
        }
        self.require(moe.aux_loss >= 0.0, "aux_loss", moe.aux_loss, "be at least 0");
        self.require(moe.z_loss >= 0.0, "z_loss", moe.z_loss, "be at least 0");
    }

    /// Limits the numbers of tensors and parameters. In f64, because products of the sizes may overflow.
    fn totals(&mut self, shape: &Shape) {
        let float = |size: usize| size as f64;
        let experts = shape.moe.map_or(1.0, |moe| float(moe.experts) + float(moe.shared));
        let head = float(shape.head_dim) + float(shape.value_dim());
        let heads = float(shape.heads) + float(shape.kv_heads);
        let latents = shape.latent.map_or(0.0, |latent| {
            let ranks = float(latent.q_rank.unwrap_or(0)) + float(latent.kv_rank);
            ranks * (float(shape.dim) + heads * head)
        });
        let attention = float(shape.dim) * head * heads + latents;
        let wide = float(shape.ffn) * experts + shape.lead.map_or(0.0, |lead| float(lead.ffn));
        let layer = attention + 3.0 * float(shape.dim) * wide;
        let ends = float(shape.dim) * (2.0 * float(shape.vocab) + float(shape.seq));
        let all = float(shape.layers) * layer + ends;
        // A layer without experts has at most 16 tensors.
        let tensors = 16.0 + shape.moe.map_or(0.0, |moe| 3.0 * float(moe.experts));
        let tensors = float(shape.layers) * tensors;
        if tensors > MAX_TENSORS {
            let keys: &[_] = if shape.moe.is_some() { &["experts", "layers"] } else { &["layers"] };
            let message = format!("the model has about {tensors:.1e} tensors");
            self.add(keys, message, format!("the maximum is {MAX_TENSORS:e}"));
        } else if all > MAX_PARAMETERS {
            let keys = ["dim", "layers", "ffn", "heads", "vocab", "seq"];
            let message = format!("the model has {all:.1e} parameters");
            self.add(&keys, message, format!("the maximum is {MAX_PARAMETERS:e}"));
        }
    }
}
