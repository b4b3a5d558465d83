//! Matrix products through cuBLASLt. For each problem the library's heuristic proposes some algorithms; the first
//! use times them and keeps the fastest, also on disk for later runs.

mod api;
mod chosen;
mod problem;

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

use lockstep_cuda::{
    Arena, Context, CudaError, DeviceBuffer, Result, Stream,
    driver::Handle,
    loader::{self, Library},
};

use api::{Algorithm, Functions, HeuristicResult};
use chosen::{Chosen, SharedChosen};
pub(crate) use problem::{Addend, EpilogueKind, Inputs, Problem, alignment};

use crate::{Dtype, Fp8Format};

/// Memory that algorithms may use, e.g. to split the inner dimension. cuBLAS recommends 32 MiB for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Algorithms that are timed for each problem.
const CANDIDATES: usize = 8;

/// Timed repetitions of a candidate in a round, after one that is not.
const REPETITIONS: usize = 5;

/// Rounds over all candidates. The fastest round counts, because the clock of the GPU changes.
const ROUNDS: usize = 3;

/// Descriptors that are kept. The row counts of experts give new problems in every step.
const MOST_PREPARED: usize = 4096;

/// The library, its workspace, and the problems seen so far.
pub(crate) struct BlasLt {
    api: Functions,
    handle: Handle,
    pub version: usize,
    pub library: Library,
    workspace: DeviceBuffer,
    context: Arc<Context>,
    /// Algorithms of all devices on this GPU, so that they compute the same bits.
    chosen: SharedChosen,
    prepared: Mutex<HashMap<Problem, Option<Prepared>>>,
}

/// A problem with its descriptors and algorithm.
#[derive(Clone, Copy)]
pub(crate) struct Prepared {
    desc: Handle,
    a: Handle,
    b: Handle,
    out: Handle,
    algorithm: Algorithm,
}

// SAFETY: handles of cuBLASLt may be used from any thread; descriptors are changed under the lock only.
unsafe impl Send for BlasLt {}
// SAFETY: as above.
unsafe impl Sync for BlasLt {}
// SAFETY: as above.
unsafe impl Send for Prepared {}

/// Addresses of one multiplication.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Operands {
    pub a: u64,
    pub b: u64,
    /// The addend; `out` if there is none.
    pub c: u64,
    pub out: u64,
    /// Zero without a bias.
    pub bias: u64,
    /// Where the input of GELU is stored or read; zero without GELU.
    pub pre_gelu: u64,
    /// Addresses of the f32 factors of `a` and `b`; zero if they are not fp8.
    pub scales: [u64; 2],
}

impl BlasLt {
    pub fn load(context: &Arc<Context>) -> Result<BlasLt> {
        let library = Library::open(&loader::CUBLASLT)?;
        let api = Functions::load(&library)?;
        // SAFETY: a plain call.
        let version = unsafe { (api.cublasLtGetVersion)() };
        let handle = shared_handle(&api, context).map_err(|status| {
            CudaError::new(format!(
                "cuBLASLt {version} in {} does not start (status {status}): it must match the driver's CUDA version",
                library.path.display()
            ))
        })?;
        Ok(BlasLt {
            api,
            handle,
            version,
            library,
            workspace: context.allocate(WORKSPACE, "the workspace of cuBLASLt")?,
            context: context.clone(),
            chosen: Chosen::of_gpu(&context.name, version),
            prepared: Mutex::default(),
        })
    }

    /// The algorithm of a problem, if it was prepared before; `Some(None)` if cuBLASLt has none.
    pub fn prepared(&self, problem: &Problem) -> Option<Option<Prepared>> {
        self.lock().get(problem).copied()
    }

    /// Selects the algorithm of a problem, if cuBLASLt has one, and remembers it. The stream must have all earlier
    /// operations: the trials use the operands.
    pub fn prepare(
        &self,
        stream: &Stream,
        problem: &Problem,
        operands: Operands,
    ) -> Option<Prepared> {
        self.context.api();
        let mut all = self.lock();
        if all.len() >= MOST_PREPARED {
            let old = all.drain().filter_map(|(_, prepared)| prepared);
            old.for_each(|prepared| self.destroy(&prepared));
        }
        let prepared = self.select(stream, problem, operands);
        all.insert(*problem, prepared);
        prepared
    }

    /// Enqueues a multiplication.
    pub fn run(
        &self,
        stream: &Stream,
        problem: &Problem,
        prepared: &Prepared,
        operands: Operands,
    ) -> Result<()> {
        self.context.api();
        self.set_pointers(prepared, &operands);
        match self.enqueue(stream, problem, prepared, operands) {
            0 => Ok(()),
            status => Err(CudaError::new(format!(
                "cuBLASLt fails with status {status} for {}",
                problem.text()
            ))),
        }
    }

    /// Reads a choice between cuBLASLt and a kernel of our own: the file of algorithms has those as well.
    pub fn stored(&self, problem: &str) -> Option<[u64; 8]> {
        self.all_chosen().get(problem).map(|algorithm| algorithm.0)
    }

    /// Stores such a choice, unless another process was faster. Returns what is stored.
    pub fn agree(&self, problem: String, words: [u64; 8]) -> [u64; 8] {
        self.all_chosen().agree(problem, Algorithm(words)).0
    }

    fn all_chosen(&self) -> MutexGuard<'_, Chosen> {
        self.chosen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Problem, Option<Prepared>>> {
        self.prepared.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Creates the descriptors and selects the algorithm.
    fn select(&self, stream: &Stream, problem: &Problem, operands: Operands) -> Option<Prepared> {
        let mut prepared = self.describe(problem);
        self.set_pointers(&prepared, &operands);
        if problem.is_short() {
            let Some(first) = self.candidates(problem, &prepared).first().copied() else {
                self.destroy(&prepared);
                return None;
            };
            return Some(Prepared { algorithm: first, ..prepared });
        }
        // Held during the trials: other ranks of this process wait for the result instead of trying as well.
        let mut chosen = self.all_chosen();
        let class = problem.class().text();
        let known = chosen.get(&class);
        if let Some(algorithm) = known {
            prepared.algorithm = algorithm;
            if self.is_valid(&prepared) {
                return Some(prepared);
            }
        }
        let candidates = self.candidates(problem, &prepared);
        let Some(first) = candidates.first() else {
            self.destroy(&prepared);
            return None;
        };
        prepared.algorithm = *first;
        // The class has an algorithm, but this member cannot use it.
        if known.is_some() {
            return Some(prepared);
        }
        if candidates.len() > 1 {
            let fastest = self.fastest(stream, problem, prepared, operands, &candidates);
            prepared.algorithm = fastest.unwrap_or(*first);
        }
        prepared.algorithm = chosen.agree(class, prepared.algorithm);
        if !self.is_valid(&prepared) {
            prepared.algorithm = *first;
        }
        Some(prepared)
    }

    fn describe(&self, problem: &Problem) -> Prepared {
        let Problem { m, n, k, a_transposed, b_transposed, inputs, output, .. } = *problem;
        let compute = if problem.tf32 { api::COMPUTE_32F_FAST_TF32 } else { api::COMPUTE_32F };
        let mut desc = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        let status = unsafe { (self.api.cublasLtMatmulDescCreate)(&mut desc, compute, api::R_32F) };
        assert_eq!(status, 0, "cuBLASLt cannot describe {}", problem.text());
        // The operands change places, see `problem`.
        self.set(desc, api::TRANSA, &(b_transposed as c_int));
        self.set(desc, api::TRANSB, &(a_transposed as c_int));
        let epilogue = match problem.epilogue {
            EpilogueKind::None => api::EPILOGUE_DEFAULT,
            EpilogueKind::Bias => api::EPILOGUE_BIAS,
            EpilogueKind::Gelu => api::EPILOGUE_GELU_AUX,
            EpilogueKind::BiasGelu => api::EPILOGUE_GELU_AUX_BIAS,
            EpilogueKind::GeluBackward => api::EPILOGUE_DGELU,
        };
        self.set(desc, api::EPILOGUE, &epilogue);
        if !matches!(problem.epilogue, EpilogueKind::None | EpilogueKind::Bias) {
            self.set(desc, api::EPILOGUE_AUX_LD, &(n as i64));
        }
        if matches!(problem.epilogue, EpilogueKind::Bias | EpilogueKind::BiasGelu) {
            self.set(desc, api::BIAS_DATA_TYPE, &data_type(output));
        }
        if let Inputs::Fp8 { fast, .. } = inputs {
            self.set(desc, api::FAST_ACCUM, &(fast as i8));
        }
        // The columns of a row-major matrix are the rows of a column-major one.
        let layout = |kind, rows, cols| {
            let mut layout = std::ptr::null_mut();
            // SAFETY: a valid pointer.
            let status = unsafe {
                (self.api.cublasLtMatrixLayoutCreate)(
                    &mut layout,
                    kind,
                    cols as u64,
                    rows as u64,
                    cols as i64,
                )
            };
            assert_eq!(status, 0, "cuBLASLt cannot describe {}", problem.text());
            layout
        };
        let sides = |transposed, rows, cols| if transposed { (cols, rows) } else { (rows, cols) };
        let (a_sides, b_sides) = (sides(a_transposed, m, k), sides(b_transposed, k, n));
        let [a, b] = match inputs {
            Inputs::Of(dtype) => [data_type(dtype); 2],
            Inputs::Fp8 { a, b, .. } => [a, b].map(fp8_type),
        };
        Prepared {
            desc,
            a: layout(a, a_sides.0, a_sides.1),
            b: layout(b, b_sides.0, b_sides.1),
            out: layout(data_type(output), m, n),
            algorithm: Algorithm::default(),
        }
    }

    fn destroy(&self, prepared: &Prepared) {
        // SAFETY: created by `describe` and not used again.
        unsafe {
            (self.api.cublasLtMatmulDescDestroy)(prepared.desc);
            for layout in [prepared.a, prepared.b, prepared.out] {
                (self.api.cublasLtMatrixLayoutDestroy)(layout);
            }
        }
    }

    fn set_pointers(&self, prepared: &Prepared, operands: &Operands) {
        if operands.bias != 0 {
            self.set(prepared.desc, api::BIAS_POINTER, &operands.bias);
        }
        if operands.pre_gelu != 0 {
            self.set(prepared.desc, api::EPILOGUE_AUX_POINTER, &operands.pre_gelu);
        }
        let [a, b] = operands.scales;
        if a != 0 {
            // The operands change places.
            self.set(prepared.desc, api::A_SCALE_POINTER, &b);
            self.set(prepared.desc, api::B_SCALE_POINTER, &a);
        }
    }

    fn set<T>(&self, desc: Handle, attribute: c_int, value: &T) {
        let (value, bytes) = ((value as *const T).cast::<c_void>(), size_of::<T>());
        // SAFETY: the attribute has this size.
        let status =
            unsafe { (self.api.cublasLtMatmulDescSetAttribute)(desc, attribute, value, bytes) };
        assert_eq!(status, 0, "cuBLASLt refuses attribute {attribute}");
    }

    /// Whether an algorithm that was stored can be used here.
    fn is_valid(&self, prepared: &Prepared) -> bool {
        let Prepared { desc, a, b, out, algorithm } = prepared;
        let mut result = HeuristicResult::default();
        // SAFETY: valid handles and pointers.
        let status = unsafe {
            (self.api.cublasLtMatmulAlgoCheck)(
                self.handle,
                *desc,
                *b,
                *a,
                *out,
                *out,
                algorithm,
                &mut result,
            )
        };
        status == 0 && result.state == 0 && result.workspace_bytes <= WORKSPACE
    }

    /// Algorithms that the heuristic proposes, best first.
    fn candidates(&self, problem: &Problem, prepared: &Prepared) -> Vec<Algorithm> {
        let Prepared { desc, a, b, out, .. } = *prepared;
        let (mut preference, mut found) = (std::ptr::null_mut(), 0);
        let mut results = [HeuristicResult::default(); CANDIDATES];
        let [a_align, b_align, c_align, d_align] = problem.alignment.map(u32::from);
        // SAFETY: valid handles and pointers; the attributes have these sizes.
        unsafe {
            let status = (self.api.cublasLtMatmulPreferenceCreate)(&mut preference);
            assert_eq!(status, 0, "cuBLASLt cannot describe its preferences");
            let set = |attribute, value: *const c_void, bytes| {
                (self.api.cublasLtMatmulPreferenceSetAttribute)(preference, attribute, value, bytes)
            };
            set(api::MAX_WORKSPACE_BYTES, (&raw const WORKSPACE_BYTES).cast(), 8);
            for (attribute, bytes) in [
                (api::MIN_ALIGNMENT_A_BYTES, b_align),
                (api::MIN_ALIGNMENT_B_BYTES, a_align),
                (api::MIN_ALIGNMENT_C_BYTES, c_align),
                (api::MIN_ALIGNMENT_D_BYTES, d_align),
            ] {
                set(attribute, (&raw const bytes).cast(), 4);
            }
            let status = (self.api.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                desc,
                b,
                a,
                out,
                out,
                preference,
                CANDIDATES as c_int,
                results.as_mut_ptr(),
                &mut found,
            );
            (self.api.cublasLtMatmulPreferenceDestroy)(preference);
            if status != 0 {
                return Vec::new();
            }
        }
        let usable = |result: &&HeuristicResult| result.state == 0;
        results[..found as usize].iter().filter(usable).map(|result| result.algorithm).collect()
    }

    /// Times the candidates. None if there is no memory for the output of the trials.
    fn fastest(
        &self,
        stream: &Stream,
        problem: &Problem,
        prepared: Prepared,
        operands: Operands,
        candidates: &[Algorithm],
    ) -> Option<Algorithm> {
        // The trials must not add to the output more than once.
        let bytes = problem.m * problem.n * problem.output.bytes();
        let trial = match problem.addend {
            Addend::Output => Some(Arena::of(self.context.clone(), bytes)?),
            Addend::None | Addend::Other => None,
        };
        let operands = trial.as_ref().map_or(operands, |trial| Operands {
            c: trial.start(),
            out: trial.start(),
            ..operands
        });
        let time = |algorithm: &Algorithm| {
            let prepared = Prepared { algorithm: *algorithm, ..prepared };
            if self.enqueue(stream, problem, &prepared, operands) != 0 {
                return None;
            }
            let start = stream.record();
            for _ in 0..REPETITIONS {
                self.enqueue(stream, problem, &prepared, operands);
            }
            Some((stream.record().elapsed_since(&start), *algorithm))
        };
        let timed = (0..ROUNDS).flat_map(|_| candidates).filter_map(time);
        timed.min_by_key(|(time, _)| *time).map(|(_, algorithm)| algorithm)
    }

    fn enqueue(
        &self,
        stream: &Stream,
        problem: &Problem,
        prepared: &Prepared,
        operands: Operands,
    ) -> c_int {
        let alpha = 1.0f32;
        let beta = if problem.addend == Addend::None { 0.0f32 } else { 1.0 };
        let Prepared { desc, a, b, out, algorithm } = prepared;
        // SAFETY: the operands are matrices of the described sizes on this GPU, and live until later operations of
        // this stream reuse their memory.
        unsafe {
            (self.api.cublasLtMatmul)(
                self.handle,
                *desc,
                (&raw const alpha).cast(),
                operands.b as *const c_void,
                *b,
                operands.a as *const c_void,
                *a,
                (&raw const beta).cast(),
                operands.c as *const c_void,
                *out,
                operands.out as *mut c_void,
                *out,
                algorithm,
                self.workspace.address as *mut c_void,
                WORKSPACE,
                stream.handle(),
            )
        }
    }
}

static WORKSPACE_BYTES: usize = WORKSPACE;

impl Drop for BlasLt {
    fn drop(&mut self) {
        let all = self.prepared.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let all: Vec<Prepared> = all.drain().filter_map(|(_, prepared)| prepared).collect();
        all.iter().for_each(|prepared| self.destroy(prepared));
    }
}

/// The handle of a GPU, which all threads of the process share. It is never destroyed: cuBLASLt would wait for everything
/// on the GPU, which crashed in the driver while other threads opened and closed devices.
fn shared_handle(api: &Functions, context: &Context) -> std::result::Result<Handle, c_int> {
    static HANDLES: Mutex<BTreeMap<usize, SharedHandle>> = Mutex::new(BTreeMap::new());
    let mut handles = HANDLES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(SharedHandle(handle)) = handles.get(&context.index) {
        return Ok(*handle);
    }
    context.api();
    let mut handle = std::ptr::null_mut();
    // SAFETY: a valid pointer.
    let status = unsafe { (api.cublasLtCreate)(&mut handle) };
    if status != 0 {
        return Err(status);
    }
    handles.insert(context.index, SharedHandle(handle));
    Ok(handle)
}

struct SharedHandle(Handle);

// SAFETY: handles of cuBLASLt may be used from any thread, also by several at once.
unsafe impl Send for SharedHandle {}

fn data_type(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::F32 => api::R_32F,
        Dtype::Bf16 => api::R_16BF,
        dtype => panic!("a matrix is f32 or bf16, not {dtype}"),
    }
}

fn fp8_type(format: Fp8Format) -> c_int {
    match format {
        Fp8Format::E4m3 => api::R_8F_E4M3,
        Fp8Format::E5m2 => api::R_8F_E5M2,
    }
}
