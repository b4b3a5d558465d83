//! The start/wait form of every collective: the call takes its buffers, goes on in the background
//! while the caller computes, and gives them back from `wait`. Many may be under way at a time; those
//! of one group are carried out in the order in which they were started.

use crate::call::element::{Element, bytes_of, bytes_of_mut};
use crate::call::error::Result;
use crate::call::fold::Op;
use crate::group::Group;
use crate::group::track::Pending;
use crate::group::work::Work;
use crate::health::watch::Patience;

/// A buffer that can be handed over to a started call: a `Vec`, a box, a `Symmetric`.
pub trait Buffer<T: Element>: AsRef<[T]> + AsMut<[T]> + Send + 'static {}

impl<T: Element, B: AsRef<[T]> + AsMut<[T]> + Send + 'static> Buffer<T> for B {}

impl Group {
    /// Starts [`Group::all_reduce`].
    ///
    /// ```
    /// # use lockstep_comm::{on_threads, Op};
    /// on_threads(2, |world| {
    ///     let sum = world.start_all_reduce(vec![1.0f32; 1000], Op::Sum);
    ///     let other_work: u32 = (0..1000).sum();
    ///     assert_eq!(sum.wait().unwrap(), vec![2.0f32; 1000]);
    ///     assert_eq!(other_work, 499_500);
    /// });
    /// ```
    pub fn start_all_reduce<T: Element, B: Buffer<T>>(
        &self,
        buffer: B,
        op: Op,
    ) -> Pending<Result<B>> {
        self.start::<T, B>(buffer, move |b| Work::AllReduce {
            bytes: bytes_of_mut(B::as_mut(b)),
            op,
        })
    }

    /// Starts [`Group::reduce`].
    pub fn start_reduce<T: Element, B: Buffer<T>>(
        &self,
        buffer: B,
        op: Op,
        root: usize,
    ) -> Pending<Result<B>> {
        self.start::<T, B>(buffer, move |b| Work::Reduce {
            bytes: bytes_of_mut(B::as_mut(b)),
            op,
            root,
        })
    }

    /// Starts [`Group::reduce_scatter`]; gives back (input, output).
    pub fn start_reduce_scatter<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        output: B,
        op: Op,
    ) -> Pending<Result<(A, B)>> {
        self.start::<T, (A, B)>((input, output), move |(a, b)| Work::ReduceScatter {
            input: bytes_of(A::as_ref(a)),
            output: bytes_of_mut(B::as_mut(b)),
            op,
        })
    }

    /// Starts [`Group::all_gather`]; gives back (input, output).
    pub fn start_all_gather<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        output: B,
    ) -> Pending<Result<(A, B)>> {
        self.start::<T, (A, B)>((input, output), move |(a, b)| Work::AllGather {
            input: bytes_of(A::as_ref(a)),
            output: bytes_of_mut(B::as_mut(b)),
        })
    }

    /// Starts [`Group::broadcast`].
    pub fn start_broadcast<T: Element, B: Buffer<T>>(
        &self,
        buffer: B,
        root: usize,
    ) -> Pending<Result<B>> {
        self.start::<T, B>(buffer, move |b| Work::Broadcast {
            bytes: bytes_of_mut(B::as_mut(b)),
            root,
        })
    }

    /// Starts [`Group::gather`]; gives back (input, output).
    pub fn start_gather<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        output: B,
        root: usize,
    ) -> Pending<Result<(A, B)>> {
        let at_root = self.rank() == root;
        self.start::<T, (A, B)>((input, output), move |(a, b)| Work::Gather {
            input: bytes_of(A::as_ref(a)),
            output: bytes_of_mut(if at_root { B::as_mut(b) } else { &mut [] }),
            root,
        })
    }

    /// Starts [`Group::scatter`]; gives back (input, output).
    pub fn start_scatter<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        output: B,
        root: usize,
    ) -> Pending<Result<(A, B)>> {
        let at_root = self.rank() == root;
        self.start::<T, (A, B)>((input, output), move |(a, b)| Work::Scatter {
            input: bytes_of(if at_root { A::as_ref(a) } else { &[] }),
            output: bytes_of_mut(B::as_mut(b)),
            root,
        })
    }

    /// Starts [`Group::all_to_all`]; gives back (input, output).
    pub fn start_all_to_all<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        output: B,
    ) -> Pending<Result<(A, B)>> {
        self.start::<T, (A, B)>((input, output), move |(a, b)| Work::AllToAll {
            input: bytes_of(A::as_ref(a)),
            output: bytes_of_mut(B::as_mut(b)),
        })
    }

    /// Starts [`Group::all_to_all_v`]; gives back (input, output).
    pub fn start_all_to_all_v<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        sent: Vec<usize>,
        output: B,
        received: Vec<usize>,
    ) -> Pending<Result<(A, B)>> {
        self.start::<T, (A, B)>((input, output), move |(a, b)| Work::AllToAllV {
            input: bytes_of(A::as_ref(a)),
            sent: sent.clone().into(),
            output: bytes_of_mut(B::as_mut(b)),
            received: received.clone().into(),
        })
    }

    /// Starts [`Group::barrier`].
    pub fn start_barrier(&self) -> Pending<Result<()>> {
        self.start::<u8, ()>((), |()| Work::Barrier)
    }

    /// Starts [`Group::send`].
    pub fn start_send<T: Element, B: Buffer<T>>(&self, buffer: B, to: usize) -> Pending<Result<B>> {
        let inner = self.inner.clone();
        let Some(track) = inner.messages.to.get(to).cloned() else {
            return Pending::ready(self.check_peer(to).map(|()| buffer));
        };
        track.start(move |number, end| {
            let bytes = bytes_of(buffer.as_ref());
            let call = inner.transfer_call(T::DTYPE, bytes.len(), number);
            inner.recorded(call, Patience::BACKGROUND, |watch| end.send(&watch, bytes))?;
            inner.count_message(bytes.len());
            Ok(buffer)
        })
    }

    /// Starts [`Group::receive`].
    pub fn start_receive<T: Element, B: Buffer<T>>(
        &self,
        mut buffer: B,
        from: usize,
    ) -> Pending<Result<B>> {
        let inner = self.inner.clone();
        let Some(track) = inner.messages.from.get(from).cloned() else {
            return Pending::ready(self.check_peer(from).map(|()| buffer));
        };
        track.start(move |number, end| {
            let bytes = bytes_of_mut(buffer.as_mut());
            let call = inner.transfer_call(T::DTYPE, bytes.len(), number);
            inner.recorded(call, Patience::BACKGROUND, |watch| end.receive(&watch, bytes))?;
            Ok(buffer)
        })
    }
}
