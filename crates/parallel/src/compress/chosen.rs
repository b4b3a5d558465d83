//! Sums of the elements that are largest on each rank, beside what is usual in their places. They are sent as they
//! are, with their places; the others wait. Everybody adds them up in the order of the members, so all come to the
//! same bits.

use super::{bytes, room};
use lockstep_comm::{Group, Result, shard_range};
use lockstep_kernels::cpu::largest::PAIR;
use lockstep_kernels::{Device, Dtype, Tag};

pub(super) struct Work<'a> {
    pub device: &'a Device,
    pub group: &'a Group,
    /// Elements that each rank sends.
    pub k: usize,
    pub error: &'a mut [f32],   // (len)
    pub squares: &'a mut [f32], // (len): what is usual in each place
}

/// Everybody's largest to everybody.
pub(super) fn all_reduce(mut work: Work, buffer: &mut [f32]) -> Result<()> {
    let one = work.k * PAIR;
    let all = one * work.group.size();
    let (mut own, mut into) = (room(work.device, one), room(work.device, all));
    let (own, into) = (&mut bytes(&mut own)[..one], &mut bytes(&mut into)[..all]);
    work.take(buffer, own);
    work.group.all_gather(own, into)?;
    buffer.fill(0.0);
    add_pairs(into, 0, buffer);
    Ok(())
}

/// Everybody's largest to the owners of the shares that they lie in.
pub(super) fn reduce_scatter(mut work: Work, input: &[f32], output: &mut [f32]) -> Result<()> {
    let (group, len, one) = (work.group, input.len(), work.k * PAIR);
    let mut own = room(work.device, one);
    let own = &mut bytes(&mut own)[..one];
    work.take(input, own);

    // Pairs come in the order of their places, so those of one share lie side by side.
    let sent = counts(own, len, group.size());
    let mut received = vec![0i64; group.size()];
    group.all_to_all(&sent, &mut received)?;
    let in_bytes = |counts: &[i64]| -> Vec<usize> {
        counts.iter().map(|count| *count as usize * PAIR).collect()
    };
    let (sent, received) = (in_bytes(&sent), in_bytes(&received));
    let all = received.iter().sum();
    let mut into = room(work.device, all);
    let into = &mut bytes(&mut into)[..all];
    group.all_to_all_v(own, &sent, into, &received)?;

    output.fill(0.0);
    add_pairs(into, shard_range(len, group.size(), group.rank()).start, output);
    Ok(())
}

impl Work<'_> {
    fn take(&mut self, x: &[f32], pairs: &mut [u8]) {
        let mut ratios = self.device.empty(1, x.len(), Dtype::F32, Tag::Buffers);
        let ratios = ratios.view_mut().host();
        self.device.take_unusual(x, self.error, self.squares, ratios, pairs);
    }
}

/// How many pairs lie in the share of each member.
fn counts(pairs: &[u8], len: usize, members: usize) -> Vec<i64> {
    let pairs = pairs.as_chunks::<PAIR>().0;
    let before = |place: usize| pairs.partition_point(|pair| read(*pair).0 < place);
    let shares = (0..members).map(|member| shard_range(len, members, member));
    shares.map(|share| (before(share.end) - before(share.start)) as i64).collect()
}

/// Adds pairs to a buffer that begins at `first`.
fn add_pairs(pairs: &[u8], first: usize, out: &mut [f32]) {
    for pair in pairs.as_chunks::<PAIR>().0 {
        let (place, number) = read(*pair);
        out[place - first] += number;
    }
}

fn read(pair: [u8; PAIR]) -> (usize, f32) {
    let word = u64::from_le_bytes(pair);
    (word as u32 as usize, f32::from_bits((word >> 32) as u32))
}
