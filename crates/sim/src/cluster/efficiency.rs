//! Measured efficiency of operation classes. On CPU cores an exponential or a row sum can be slower than the memory, so
//! peak and bandwidth are not enough. Knows nothing about plans.

use lockstep_plan::Dtype;
use lockstep_plan::model::Family;
use serde::{Deserialize, Serialize};

use crate::compute::OpClass;

/// Measured efficiency by compute type.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    pub f32: FamilyCurves,
    pub bf16: FamilyCurves,
}

/// Measured efficiency by model family.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FamilyCurves {
    pub gpt2: OpCurves,
    pub llama: OpCurves,
    /// Classes that are not measured are as fast as in `llama`.
    #[serde(default)]
    pub moe: OpCurves,
}

/// Efficiency of each operation class by size. Matmul: relative to an isolated matmul. Attention: relative to the
/// measured rates of the accelerator, or to the peak. Others: relative to the memory bandwidth; above 1 if data fits into caches.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OpCurves {
    pub matmul: Curve,
    pub attention: Curve,
    pub rope: Curve,
    pub norm: Curve,
    pub activation: Curve,
    pub embedding: Curve,
    pub loss: Curve,
    pub optimizer: Curve,
    pub routing: Curve,
    pub elementwise: Curve,
}

/// Points (size, value), ordered by size. Interpolated log-log, constant beyond the ends. Empty: not measured.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Curve(pub Vec<(f64, f64)>);

impl Efficiency {
    /// The curve of an operation class. Mixtures of experts use that of Llama if they have none.
    pub fn curve(&self, compute: Dtype, family: Family, kind: OpClass) -> &Curve {
        let families = match compute {
            Dtype::F32 => &self.f32,
            _ => &self.bf16,
        };
        match family {
            Family::Gpt2 => families.gpt2.of(kind),
            Family::Moe if !families.moe.of(kind).0.is_empty() => families.moe.of(kind),
            Family::Llama | Family::Moe => families.llama.of(kind),
        }
    }

    /// Multiplies the efficiency of a class, in all families and types.
    pub(crate) fn scale(&mut self, kind: OpClass, factor: f64) {
        for FamilyCurves { gpt2, llama, moe } in [&mut self.f32, &mut self.bf16] {
            for curves in [gpt2, llama, moe] {
                curves.of_mut(kind).0.iter_mut().for_each(|(_, reached)| *reached *= factor);
            }
        }
    }

    pub fn of_mut(&mut self, compute: Dtype, family: Family) -> &mut OpCurves {
        let families = match compute {
            Dtype::F32 => &mut self.f32,
            _ => &mut self.bf16,
        };
        match family {
            Family::Gpt2 => &mut families.gpt2,
            Family::Llama => &mut families.llama,
            Family::Moe => &mut families.moe,
        }
    }
}

impl OpCurves {
    pub fn of(&self, kind: OpClass) -> &Curve {
        match kind {
            OpClass::Matmul => &self.matmul,
            OpClass::Attention => &self.attention,
            OpClass::Rope => &self.rope,
            OpClass::Norm => &self.norm,
            OpClass::Activation => &self.activation,
            OpClass::Embedding => &self.embedding,
            OpClass::Loss => &self.loss,
            OpClass::Optimizer => &self.optimizer,
            OpClass::Routing => &self.routing,
            OpClass::Elementwise => &self.elementwise,
        }
    }

    pub fn of_mut(&mut self, kind: OpClass) -> &mut Curve {
        match kind {
            OpClass::Matmul => &mut self.matmul,
            OpClass::Attention => &mut self.attention,
            OpClass::Rope => &mut self.rope,
            OpClass::Norm => &mut self.norm,
            OpClass::Activation => &mut self.activation,
            OpClass::Embedding => &mut self.embedding,
            OpClass::Loss => &mut self.loss,
            OpClass::Optimizer => &mut self.optimizer,
            OpClass::Routing => &mut self.routing,
            OpClass::Elementwise => &mut self.elementwise,
        }
    }
}

impl Curve {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value at a size.
    ///
    /// ```
    /// use lockstep_sim::Curve;
    /// let curve = Curve(vec![(1.0, 2.0), (100.0, 8.0)]);
    /// assert_eq!([0.5, 1.0, 1e6].map(|size| curve.at(size)), [Some(2.0), Some(2.0), Some(8.0)]);
    /// assert!((curve.at(10.0).unwrap() - 4.0).abs() < 1e-9);
    /// ```
    pub fn at(&self, size: f64) -> Option<f64> {
        let points = &self.0;
        let last = points.last()?;
        let Some(after) = points.iter().position(|(at, _)| *at >= size) else {
            return Some(last.1);
        };
        let Some(before) = after.checked_sub(1) else { return Some(points[0].1) };
        let ((low, first), (high, second)) = (points[before], points[after]);
        let share = (size / low).ln() / (high / low).ln();
        Some(first * (second / first).powf(share))
    }

    /// Inserts a point.
    pub fn add(&mut self, size: f64, value: f64) {
        let at = self.0.partition_point(|(other, _)| *other < size);
        self.0.insert(at, (size, value));
    }
}
