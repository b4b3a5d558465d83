//! Started (asynchronous) forms of every collective and message: the call takes its buffers, runs on the
//! group's communication thread while the caller computes, and returns them from `wait`. Many calls may be in
//! flight at a time; the calls of one group run in the order in which they were started.

use crate::call::error::Result;
use crate::call::fold::Op;
use crate::group::Group;
use crate::group::track::Pending;
use lockstep_types::Element;

/// A buffer that can be moved into a started call: a `Vec`, a box, a `Symmetric`.
pub trait Buffer<T: Element>: AsRef<[T]> + AsMut<[T]> + Send + 'static {}

impl<T: Element, B: AsRef<[T]> + AsMut<[T]> + Send + 'static> Buffer<T> for B {}

impl Group {
    /// Runs a sequence of calls on the group's communication thread. No other collective of this group runs
    /// between its first and its last call, so that all members see the same order. The sequence may also call
    /// other groups, provided that no other thread does so at the same time.
    ///
    /// ```
    /// # use lockstep_comm::{on_threads, Op};
    /// on_threads(2, |world| {
    ///     let product = world.start(|group| -> lockstep_comm::Result<f32> {
    ///         let mut x = [3.0f32];
    ///         group.all_reduce(&mut x, Op::Sum)?;
    ///         group.all_reduce(&mut x, Op::Product)?;
    ///         Ok(x[0])
    ///     });
    ///     assert_eq!(product.wait().unwrap(), 36.0);
    /// });
    /// ```
    pub fn start<R: Send + 'static>(
        &self,
        sequence: impl FnOnce(&Group) -> R + Send + 'static,
    ) -> Pending<R> {
        let group = self.clone();
        self.inner.track.start(move || sequence(&group))
    }

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
        mut buffer: B,
        op: Op,
    ) -> Pending<Result<B>> {
        self.start(move |group| group.all_reduce::<T>(buffer.as_mut(), op).map(|()| buffer))
    }

    /// Starts [`Group::reduce`].
    pub fn start_reduce<T: Element, B: Buffer<T>>(
        &self,
        mut buffer: B,
        op: Op,
        root: usize,
    ) -> Pending<Result<B>> {
        self.start(move |group| group.reduce::<T>(buffer.as_mut(), op, root).map(|()| buffer))
    }

    /// Starts [`Group::reduce_scatter`]; returns (input, output).
    pub fn start_reduce_scatter<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        mut output: B,
        op: Op,
    ) -> Pending<Result<(A, B)>> {
        self.start(move |group| {
            group.reduce_scatter::<T>(input.as_ref(), output.as_mut(), op)?;
            Ok((input, output))
        })
    }

    /// Starts [`Group::all_gather`]; returns (input, output).
    pub fn start_all_gather<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        mut output: B,
    ) -> Pending<Result<(A, B)>> {
        self.start(move |group| {
            group.all_gather::<T>(input.as_ref(), output.as_mut())?;
            Ok((input, output))
        })
    }

    /// Starts [`Group::broadcast`].
    pub fn start_broadcast<T: Element, B: Buffer<T>>(
        &self,
        mut buffer: B,
        root: usize,
    ) -> Pending<Result<B>> {
        self.start(move |group| group.broadcast::<T>(buffer.as_mut(), root).map(|()| buffer))
    }

    /// Starts [`Group::gather`]; returns (input, output).
    pub fn start_gather<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        mut output: B,
        root: usize,
    ) -> Pending<Result<(A, B)>> {
        self.start(move |group| {
            group.gather::<T>(input.as_ref(), output.as_mut(), root)?;
            Ok((input, output))
        })
    }

    /// Starts [`Group::scatter`]; returns (input, output).
    pub fn start_scatter<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        mut output: B,
        root: usize,
    ) -> Pending<Result<(A, B)>> {
        self.start(move |group| {
            group.scatter::<T>(input.as_ref(), output.as_mut(), root)?;
            Ok((input, output))
        })
    }

    /// Starts [`Group::all_to_all`]; returns (input, output).
    pub fn start_all_to_all<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        mut output: B,
    ) -> Pending<Result<(A, B)>> {
        self.start(move |group| {
            group.all_to_all::<T>(input.as_ref(), output.as_mut())?;
            Ok((input, output))
        })
    }

    /// Starts [`Group::all_to_all_v`]; returns (input, output).
    pub fn start_all_to_all_v<T: Element, A: Buffer<T>, B: Buffer<T>>(
        &self,
        input: A,
        sent: Vec<usize>,
        mut output: B,
        received: Vec<usize>,
    ) -> Pending<Result<(A, B)>> {
        self.start(move |group| {
            group.all_to_all_v::<T>(input.as_ref(), &sent, output.as_mut(), &received)?;
            Ok((input, output))
        })
    }

    /// Starts [`Group::barrier`].
    pub fn start_barrier(&self) -> Pending<Result<()>> {
        self.start(Group::barrier)
    }

    /// Starts [`Group::send`].
    pub fn start_send<T: Element, B: Buffer<T>>(&self, buffer: B, to: usize) -> Pending<Result<B>> {
        let group = self.clone();
        let Some(track) = self.inner.messages.to.get(to) else {
            return Pending::ready(self.check_peer(to).map(|()| buffer));
        };
        track.start(move || group.send::<T>(buffer.as_ref(), to).map(|()| buffer))
    }

    /// Starts [`Group::receive`].
    pub fn start_receive<T: Element, B: Buffer<T>>(
        &self,
        mut buffer: B,
        from: usize,
    ) -> Pending<Result<B>> {
        let group = self.clone();
        let Some(track) = self.inner.messages.from.get(from) else {
            return Pending::ready(self.check_peer(from).map(|()| buffer));
        };
        track.start(move || group.receive::<T>(buffer.as_mut(), from).map(|()| buffer))
    }
}
