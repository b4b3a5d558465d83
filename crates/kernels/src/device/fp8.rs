//! Matrices of 8-bit numbers with one scale each, as the operands of multiplies on GPUs of compute capability 8.9 or
//! newer (Micikevicius et al., FP8 Formats for Deep Learning).
//!
//! An fp8 multiply reads both operands along the inner dimension, so a matrix that is multiplied from both sides has a
//! plain and a transposed copy. A CPU emulates the operations with the reference functions: slow, for tests.

use super::{Backend, Device, Fp8History, Matmul, OpClass};
use crate::cuda::fp8;
use crate::reference::fp8::{decode, encode, scale};
use crate::{Dtype, Tag, Tensor, View, ViewMut};

/// Sizes of fp8 matrices are multiples of this.
pub const FP8_MULTIPLE: usize = 16;

/// Format of 8-bit numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fp8Format {
    /// 4 bits of exponent and 3 of mantissa, up to 448: activations and weights.
    E4m3,
    /// 5 bits of exponent and 2 of mantissa, up to 57,344: gradients.
    E5m2,
}

impl Fp8Format {
    /// The largest number.
    pub const fn max(self) -> f32 {
        match self {
            Fp8Format::E4m3 => 448.0,
            Fp8Format::E5m2 => 57_344.0,
        }
    }
}

/// An fp8 matrix (rows, cols).
#[derive(Clone)]
pub struct Fp8Tensor {
    pub format: Fp8Format,
    /// (rows, cols), u8
    plain: Option<Tensor>,
    /// (cols, rows), u8
    transposed: Option<Tensor>,
    /// (1, 2), f32: the inverse of the factor that elements were multiplied with, and the factor.
    scale: Tensor,
}

/// A cast to fp8.
pub struct Fp8Cast<'a> {
    pub from: Fp8Source<'a>,
    pub format: Fp8Format,
    pub copies: Fp8Copies,
    /// Tag of the transposed copy and the scale, which a layer saves. The plain copy is temporary.
    pub tag: Tag,
    /// Receives the sum of all rows before the cast (1, cols), f32; added to it if true.
    pub column_sums: Option<(ViewMut<'a>, bool)>,
    /// Take the scale from earlier casts of the matrix with this key.
    pub history: Option<(&'a Fp8History, u64)>,
}

/// The matrix that is cast: bf16, or computed from bf16 matrices in f32.
#[derive(Clone, Copy, Debug)]
pub enum Fp8Source<'a> {
    Whole(View<'a>),
    /// GELU of a matrix.
    Gelu(View<'a>),
    /// The gradient of GELU's input `x`, from the gradient `d` of its output.
    GeluGradient {
        x: View<'a>,
        d: View<'a>,
    },
    /// `silu(gate) * up`, where each row holds gate, then up.
    Swiglu(View<'a>),
}

/// Copies of a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fp8Copies {
    Plain,
    Transposed,
    Both,
}

/// Formats and scales of a multiply's operands.
#[derive(Clone, Copy)]
pub struct Fp8Scales<'a> {
    pub(crate) formats: [Fp8Format; 2],
    /// The inverse scale of each operand and the scale (1, 2), f32.
    pub(crate) scales: [View<'a>; 2],
    /// Sum products in the multiplier's own registers, with fewer than the 24 bits of f32.
    pub fast: bool,
}

impl<'a> Fp8Source<'a> {
    /// Shape of the cast matrix.
    pub(crate) fn shape(&self) -> (usize, usize) {
        match self {
            Fp8Source::Whole(x) | Fp8Source::Gelu(x) => (x.rows(), x.cols()),
            Fp8Source::GeluGradient { x, d } => {
                assert_eq!((x.rows(), x.cols()), (d.rows(), d.cols()), "gelu of {x:?}, {d:?}");
                (x.rows(), x.cols())
            }
            Fp8Source::Swiglu(x) => (x.rows(), x.cols() / 2),
        }
    }

    /// The matrix and the gradient that it is computed from.
    pub(crate) fn operands(&self) -> (View<'a>, Option<View<'a>>) {
        match *self {
            Fp8Source::Whole(x) | Fp8Source::Gelu(x) | Fp8Source::Swiglu(x) => (x, None),
            Fp8Source::GeluGradient { x, d } => (x, Some(d)),
        }
    }
}

impl Fp8Tensor {
    /// Without the plain copy, which only the forward pass needs.
    pub fn transposed_only(self) -> Fp8Tensor {
        assert!(self.transposed.is_some(), "the matrix has a transposed copy");
        Fp8Tensor { plain: None, ..self }
    }

    /// (rows, cols), u8
    pub fn plain(&self) -> View<'_> {
        self.plain.as_ref().expect("the matrix was cast with a plain copy").view()
    }

    /// (cols, rows), u8
    pub fn transposed(&self) -> View<'_> {
        self.transposed.as_ref().expect("the matrix was cast with a transposed copy").view()
    }

    /// The inverse of the factor that elements were multiplied with, and the factor (1, 2), f32.
    pub fn scale(&self) -> View<'_> {
        self.scale.view()
    }
}

impl<'a> Matmul<'a> {
    /// `out = x · wᵀ`, (rows, out): a linear layer with a weight of (out, in).
    pub fn fp8_linear(x: &'a Fp8Tensor, weight: &'a Fp8Tensor, out: ViewMut<'a>) -> Matmul<'a> {
        Matmul::fp8([x, weight], [x.plain(), weight.plain()], true, out)
    }

    /// `dx = dy · w`, (rows, in).
    pub fn fp8_linear_dx(dy: &'a Fp8Tensor, weight: &'a Fp8Tensor, dx: ViewMut<'a>) -> Matmul<'a> {
        Matmul::fp8([dy, weight], [dy.plain(), weight.transposed()], false, dx)
    }

    /// `dw = dyᵀ · x`, (out, in).
    pub fn fp8_linear_dw(dy: &'a Fp8Tensor, x: &'a Fp8Tensor, dw: ViewMut<'a>) -> Matmul<'a> {
        Matmul::fp8([dy, x], [dy.transposed(), x.transposed()], false, dw)
    }

    fn fp8(
        of: [&'a Fp8Tensor; 2],
        [a, b]: [View<'a>; 2],
        fast: bool,
        out: ViewMut<'a>,
    ) -> Matmul<'a> {
        let formats = of.map(|operand| operand.format);
        let scales = of.map(|operand| operand.scale.view());
        Matmul { fp8: Some(Fp8Scales { formats, scales, fast }), ..Matmul::linear(a, b, out) }
    }
}

impl Device {
    /// Whether this device multiplies fp8 matrices: a GPU of compute capability 8.9 or newer.
    pub fn has_fp8(&self) -> bool {
        match &self.0.backend {
            Backend::Cpu(_) => false,
            Backend::Cuda(cuda) => cuda.has_fp8(),
        }
    }

    /// Casts a matrix to fp8. Without a history, the scale maps its largest absolute value to the largest number of the
    /// format.
    ///
    /// # Panics
    /// If the sizes are not multiples of `FP8_MULTIPLE`.
    pub fn fp8_cast(&self, cast: Fp8Cast<'_>) -> Fp8Tensor {
        let (rows, cols) = cast.from.shape();
        assert!(
            rows.is_multiple_of(FP8_MULTIPLE) && cols.is_multiple_of(FP8_MULTIPLE),
            "an fp8 matrix has multiples of {FP8_MULTIPLE} rows and columns, not ({rows}, {cols})"
        );
        let (plain, transposed) = match cast.copies {
            Fp8Copies::Plain => (true, false),
            Fp8Copies::Transposed => (false, true),
            Fp8Copies::Both => (true, true),
        };
        let mut to = Fp8Tensor {
            format: cast.format,
            plain: plain.then(|| self.empty(rows, cols, Dtype::U8, Tag::Buffers)),
            transposed: transposed.then(|| self.empty(cols, rows, Dtype::U8, cast.tag)),
            scale: self.empty(1, 2, Dtype::F32, cast.tag),
        };
        let Fp8Tensor { plain, transposed, scale, .. } = &mut to;
        let copies = [plain, transposed].map(|copy| copy.as_mut().map(Tensor::view_mut));
        match &self.0.backend {
            Backend::Cpu(_) => self.emulate_cast(cast, copies, scale.view_mut()),
            Backend::Cuda(cuda) => self.execute(OpClass::Elementwise, |_| {
                let slot = cast.history.map(|(history, key)| history.place(self, key, cast.format));
                fp8::cast(cuda, cast, copies, scale.view_mut(), slot);
            }),
        }
        to
    }

    fn emulate_cast(
        &self,
        cast: Fp8Cast<'_>,
        [plain, transposed]: [Option<ViewMut<'_>>; 2],
        to_scale: ViewMut<'_>,
    ) {
        let (rows, cols) = cast.from.shape();
        let widen = |x: View<'_>| {
            let mut wide = self.empty(x.rows(), x.cols(), Dtype::F32, Tag::Buffers);
            self.cast(x, wide.view_mut());
            wide
        };
        let mut x = self.empty(rows, cols, Dtype::F32, Tag::Buffers);
        match cast.from {
            Fp8Source::Whole(from) => self.cast(from, x.view_mut()),
            Fp8Source::Gelu(from) => self.gelu(widen(from).view(), x.view_mut()),
            Fp8Source::Swiglu(from) => self.swiglu(widen(from).view(), x.view_mut()),
            Fp8Source::GeluGradient { x: from, d } => {
                self.cast(d, x.view_mut());
                self.gelu_backward(widen(from).view(), x.view_mut());
            }
        }
        if let Some((sums, add)) = cast.column_sums {
            self.column_sums(x.view(), sums, add);
        }
        let x: &[f32] = x.view().host();
        let mut scales = scale(cast.format, x);
        if let Some((history, key)) = cast.history {
            let amax = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            scales = history.emulate(key, cast.format, amax).unwrap_or(scales);
        }
        to_scale.host().copy_from_slice(&scales);
        let code = |i: usize| encode(cast.format, x[i] * scales[1]);
        if let Some(plain) = plain {
            plain.host().iter_mut().enumerate().for_each(|(i, to)| *to = code(i));
        }
        if let Some(transposed) = transposed {
            let place = |i: usize| i % rows * cols + i / rows;
            transposed.host().iter_mut().enumerate().for_each(|(i, to)| *to = code(place(i)));
        }
    }

    /// A multiply of fp8 matrices on a device without them: of the same values in f32.
    pub(super) fn emulate_matmul(&self, work: Matmul<'_>, fp8: Fp8Scales<'_>) {
        let widen = |x: View<'_>, side: usize| {
            let inverse = fp8.scales[side].host::<f32>()[0];
            let value = |code: &u8| decode(fp8.formats[side], *code) as f32 * inverse;
            let values: Vec<f32> = x.host().iter().map(value).collect();
            let mut wide = self.empty(x.rows(), x.cols(), Dtype::F32, Tag::Buffers);
            self.write(wide.view_mut(), &values);
            wide
        };
        let (a, b) = (widen(work.a, 0), widen(work.b, 1));
        self.matmul(Matmul { a: a.view(), b: b.view(), fp8: None, ..work });
    }
}
