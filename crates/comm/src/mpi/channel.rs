//! Point-to-point messages between two members over MPI: a header, then the data. The receiver posts the
//! receive for the data only if the header is as expected. Each direction of each pair has its own channel.

use super::communicator::Communicator;
use super::device::{DeviceStaging, Place};
use super::numbers::datatype;
use super::request::Request;
use super::staging::StagingBuffers;
use super::supervision::Supervision;
use crate::call::error::{Error, Result};
use crate::device::DeviceSlice;
use crate::health::watch::Watch;
use crate::link::{HEADER, check_header, header};
use lockstep_types::Dtype;
use mpi::ffi;
use std::ffi::c_int;

const HEADER_TAG: c_int = 0;
const DATA_TAG: c_int = 1;

/// One end of a channel.
pub(crate) struct Channel {
    comm: Communicator,
    /// The peer's index among the members, and its world rank.
    member: c_int,
    peer: usize,
    header: StagingBuffers,
    data: StagingBuffers,
    device: DeviceStaging,
}

impl Channel {
    pub(super) fn new(comm: Communicator, member: usize, peer: usize) -> Channel {
        let (header, data) = (StagingBuffers::default(), StagingBuffers::default());
        let device = DeviceStaging::default();
        Channel { comm, member: member as c_int, peer, header, data, device }
    }

    pub(crate) fn send(&mut self, watch: &Watch, bytes: &[u8]) -> Result<()> {
        let len = data_len(watch, bytes.len())?;
        let peers = [self.peer];
        let supervision = Supervision::call(watch, &peers);
        let failed = |what| supervision.failed(what);
        let (comm, to, kind) = (self.comm.raw.0, self.member, datatype(Dtype::U8));
        let head = self.start_header(watch, &supervision, bytes.len())?;
        let body = self.data.load(bytes, 0, Default::default());
        // SAFETY: the staging buffer holds as many bytes as are sent until the operation has ended.
        let body = Request::start(|r| unsafe {
            ffi::MPI_Isend(body.out, len, kind, to, DATA_TAG, comm, r)
        });
        body.map_err(failed)?.wait(&supervision)?;
        head.wait(&supervision)?;
        self.header.unload(0);
        self.data.unload(0);
        Ok(())
    }

    pub(crate) fn receive(&mut self, watch: &Watch, bytes: &mut [u8]) -> Result<()> {
        let len = data_len(watch, bytes.len())?;
        let peers = [self.peer];
        let supervision = Supervision::call(watch, &peers);
        let failed = |what| supervision.failed(what);
        let (comm, from, kind) = (self.comm.raw.0, self.member, datatype(Dtype::U8));
        self.receive_header(watch, &supervision, bytes.len())?;
        let addresses = self.data.load(&[], bytes.len(), Default::default());
        // SAFETY: the staging buffer holds as many bytes as are received until the operation has ended.
        let body = Request::start(|r| unsafe {
            ffi::MPI_Irecv(addresses.inc, len, kind, from, DATA_TAG, comm, r)
        });
        body.map_err(failed)?.wait(&supervision)?;
        bytes.copy_from_slice(self.data.unload(bytes.len()));
        Ok(())
    }

    /// Sends a message in device memory. Returns when it may be overwritten.
    pub(crate) fn send_from_device(
        &mut self,
        watch: &Watch,
        place: Place<'_>,
        message: DeviceSlice,
    ) -> Result<()> {
        let (bytes, stream) = (message.bytes(), place.stream);
        let len = data_len(watch, bytes)?;
        let peers = [self.peer];
        let supervision = Supervision::call(watch, &peers);
        let (comm, to, kind) = (self.comm.raw.0, self.member, datatype(Dtype::U8));
        let head = self.start_header(watch, &supervision, bytes)?;
        let at = self.device.reserve(place, &supervision, [bytes, 0])?;
        place.copy(message.address(), at[0], bytes);
        self.device.run(&supervision, stream, at, Default::default(), |b, r| {
            // SAFETY: the staging buffer holds as many bytes as are sent until the operation has ended.
            unsafe { ffi::MPI_Isend(b.out, len, kind, to, DATA_TAG, comm, r) }
        })?;
        head.wait(&supervision)?;
        self.header.unload(0);
        self.device.used(stream);
        Ok(())
    }

    /// Receives a message in device memory. Returns when its copy is enqueued.
    pub(crate) fn receive_on_device(
        &mut self,
        watch: &Watch,
        place: Place<'_>,
        message: DeviceSlice,
    ) -> Result<()> {
        let (bytes, stream) = (message.bytes(), place.stream);
        let len = data_len(watch, bytes)?;
        let peers = [self.peer];
        let supervision = Supervision::call(watch, &peers);
        let (comm, from, kind) = (self.comm.raw.0, self.member, datatype(Dtype::U8));
        self.receive_header(watch, &supervision, bytes)?;
        let at = self.device.reserve(place, &supervision, [0, bytes])?;
        self.device.run(&supervision, stream, at, Default::default(), |b, r| {
            // SAFETY: the staging buffer holds as many bytes as are received until the operation has ended.
            unsafe { ffi::MPI_Irecv(b.inc, len, kind, from, DATA_TAG, comm, r) }
        })?;
        place.copy(at[1], message.address(), bytes);
        self.device.used(stream);
        Ok(())
    }

    /// Starts to send the header of a message of `len` bytes.
    fn start_header(
        &mut self,
        watch: &Watch,
        supervision: &Supervision,
        len: usize,
    ) -> Result<Request> {
        let (comm, to, kind) = (self.comm.raw.0, self.member, datatype(Dtype::U8));
        let head = self.header.load(&header(&watch.stamp(), len, 0), 0, Default::default());
        // SAFETY: the staging buffer holds as many bytes as are sent until the operation has ended.
        let head = Request::start(|r| unsafe {
            ffi::MPI_Isend(head.out, HEADER as c_int, kind, to, HEADER_TAG, comm, r)
        });
        head.map_err(|what| supervision.failed(what))
    }

    /// Receives and checks the header of a message of `len` bytes.
    fn receive_header(
        &mut self,
        watch: &Watch,
        supervision: &Supervision,
        len: usize,
    ) -> Result<()> {
        let (comm, from, kind) = (self.comm.raw.0, self.member, datatype(Dtype::U8));
        let addresses = self.header.load(&[], HEADER, Default::default());
        // SAFETY: the staging buffer holds as many bytes as are received until the operation has ended.
        let head = Request::start(|r| unsafe {
            ffi::MPI_Irecv(addresses.inc, HEADER as c_int, kind, from, HEADER_TAG, comm, r)
        });
        head.map_err(|what| supervision.failed(what))?.wait(supervision)?;
        let head = self.header.unload(HEADER).first_chunk().expect("as long as a header");
        check_header(watch, self.peer, head, len)
    }
}

/// MPI counts in 32 bits.
fn data_len(watch: &Watch, bytes: usize) -> Result<c_int> {
    c_int::try_from(bytes).map_err(|_| {
        let what = format!(
            "{}: {bytes} bytes exceed the MPI limit of {} bytes per message; send it in pieces",
            watch.call,
            c_int::MAX
        );
        Error::Misuse { rank: watch.rank, what }
    })
}
