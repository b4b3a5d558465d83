//! Creation of subgroups and symmetric buffers: the collective steps that set up new shared memory.

use crate::call::error::{Cause, Error, Failure, Result};
use crate::call::topology::{local_members, number_hosts};
use crate::group::{Group, GroupSpec};
use crate::memory::arena::Arena;
use crate::memory::segment::{Address, Offer, Segment};
use crate::memory::symmetric::{Allocation, Symmetric};
use crate::world::context::Context;
use lockstep_types::Element;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Group {
    /// Splits the group: members with the same color form a new group, ordered by key and then by their
    /// order in this group. All members call it; a member without a color gets no group.
    ///
    /// ```
    /// # use lockstep_comm::on_threads;
    /// on_threads(4, |world| {
    ///     let color = (world.rank() % 2) as i64;
    ///     let half = world.split(Some(color), 0, "half").unwrap().unwrap();
    ///     assert_eq!(half.members(), [world.rank() % 2, world.rank() % 2 + 2]);
    /// });
    /// ```
    pub fn split(&self, color: Option<i64>, key: i64, name: &str) -> Result<Option<Group>> {
        let own = [i64::from(color.is_some()), color.unwrap_or(0), key];
        let mut all = vec![0i64; 3 * self.size()];
        self.all_gather(&own, &mut all)?;
        let mut chosen: Vec<(i64, usize)> = (0..self.size())
            .filter(|&m| color.is_some() && all[3 * m..3 * m + 2] == own[..2])
            .map(|m| (all[3 * m + 2], m))
            .collect();
        chosen.sort_unstable();
        let members: Vec<usize> = chosen.into_iter().map(|(_, m)| m).collect();
        self.form(&members, color.unwrap_or(0), name)
    }

    /// Creates groups from lists of members. All members call it, each with the list that contains it
    /// (the same list on all members that it names) or with an empty list.
    pub fn subgroup(&self, members: &[usize], name: &str) -> Result<Option<Group>> {
        // Compared first: different lists would create different groups.
        let mut own = vec![-1i64; self.size() + 1];
        for (slot, member) in own.iter_mut().zip(members) {
            *slot = i64::try_from(*member).unwrap_or(i64::MAX);
        }
        let mut all = vec![0i64; own.len() * self.size()];
        self.all_gather(&own, &mut all)?;
        let lists: Vec<&[i64]> = all.chunks(own.len()).map(entries).collect();
        if let Some(what) = find_list_error(&lists) {
            return Err(self.misuse(what));
        }
        let place = members.iter().position(|m| *m == self.rank());
        let color = members.iter().min().map(|m| *m as i64);
        self.split(color, place.unwrap_or(0) as i64, name)
    }

    /// Creates the group of these members; `None` on members that are not in the list.
    fn form(&self, members: &[usize], color: i64, name: &str) -> Result<Option<Group>> {
        let inner = &self.inner;
        let id = new_id(inner.id, inner.allocations.load(Ordering::Relaxed), color);
        #[cfg(feature = "mpi")]
        if inner.engine {
            let group = self.split_mpi(members, id, name)?;
            inner.allocations.fetch_add(1, Ordering::Relaxed);
            return Ok(group);
        }
        let ranks: Vec<usize> = members.iter().map(|m| inner.members[*m]).collect();
        let hosts = number_hosts(members.iter().map(|m| inner.hosts[*m]));
        let me = members.iter().position(|m| *m == self.rank());
        let locals = me.map_or(vec![], |me| local_members(&hosts, hosts[me]));
        let created = if locals.first() == me.as_ref() && me.is_some() {
            Some(Arena::create(locals.len()).or_else(|e| self.sharing_failed("a group", e))?)
        } else {
            None
        };
        let (arena, offer) = created.map_or((None, None), |(a, o)| (Some(a), Some(o)));
        let addresses = self.exchange_addresses(offer.as_ref())?;
        let group = match me {
            None => None,
            Some(_) => {
                let arena = match arena {
                    Some(arena) => arena,
                    None => Arena::open(addresses[members[locals[0]]], locals.len())
                        .or_else(|e| self.sharing_failed("a group", e))?,
                };
                let context = inner.context.clone();
                let spec = GroupSpec { context, id, name: name.into(), members: ranks.into() };
                Some(Group::over_links(spec, &arena))
            }
        };
        let communicator = self.split_device(members)?;
        if let Some(group) = &group {
            *group.inner.communicator.lock().unwrap_or_else(|e| e.into_inner()) = communicator;
        }
        self.inner.allocations.fetch_add(1, Ordering::Relaxed);
        // The offer must stay open until all members have mapped the memory.
        self.barrier()?;
        drop(offer);
        Ok(group)
    }

    /// Allocates a zeroed buffer of `len` elements on every member, in memory that all members of the host
    /// have mapped. All members call it with the same length.
    ///
    /// ```
    /// # use lockstep_comm::{on_threads, Op};
    /// on_threads(2, |world| {
    ///     let mut buffer = world.symmetric::<f32>(1 << 20).unwrap();
    ///     buffer.fill(1.5);
    ///     world.all_reduce(&mut buffer, Op::Sum).unwrap();
    ///     assert!(buffer.iter().all(|x| *x == 3.0));
    /// });
    /// ```
    pub fn symmetric<T: Element>(&self, len: usize) -> Result<Symmetric<T>> {
        let inner = &self.inner;
        let locals = local_members(&inner.hosts, inner.hosts[inner.me]);
        let me = locals.iter().position(|m| *m == inner.me).expect("we are on our own host");
        let stride = (len * size_of::<T>()).next_multiple_of(4096);
        let bytes = stride * locals.len();
        let created = match me {
            0 => {
                let segment = Segment::create(bytes);
                Some(segment.or_else(|e| self.sharing_failed("a symmetric buffer", e))?)
            }
            _ => None,
        };
        let (segment, offer) = created.map_or((None, None), |(s, o)| (Some(s), Some(o)));
        let addresses = self.exchange_addresses(offer.as_ref())?;
        let segment = match segment {
            Some(segment) => segment,
            None => Segment::open(addresses[locals[0]], bytes).or_else(|e| {
                self.sharing_failed("a symmetric buffer; do all members pass the same length?", e)
            })?,
        };
        let id = inner.allocations.fetch_add(1, Ordering::Relaxed) + 1;
        let allocation = Arc::new(Allocation { id, segment, stride, me });
        inner.registry.add(allocation.clone());
        self.barrier()?;
        drop(offer);
        Ok(Symmetric {
            allocation,
            registry: inner.registry.clone(),
            len,
            element: std::marker::PhantomData,
        })
    }

    /// The address that each member offers; zero for members without an offer.
    fn exchange_addresses(&self, offer: Option<&Offer>) -> Result<Vec<Address>> {
        let own = offer.map_or([0, 0], |o| {
            let address = o.address();
            [address.pid as i64, address.fd as i64]
        });
        let mut all = vec![0i64; 2 * self.size()];
        self.all_gather(&own, &mut all)?;
        Ok(all.chunks(2).map(|a| Address { pid: a[0] as u64, fd: a[1] as u64 }).collect())
    }

    /// Handles memory that could not be shared. Usually its owner has just died and the failure is about
    /// to be reported; if it is not, this error breaks the world instead.
    fn sharing_failed<T>(&self, what: &str, error: std::io::Error) -> Result<T> {
        let Context { rank, board, .. } = &*self.inner.context;
        let limit = match error.kind() {
            // The owner exists, but its memory has another size.
            std::io::ErrorKind::InvalidData => Duration::ZERO,
            _ => Duration::from_secs(5),
        };
        if board.wait_for_alarm(limit).is_none() {
            let text = format!("rank {rank} cannot share memory for {what}: {error}");
            let failure = Failure { culprit: *rank, cause: Cause::Failed, text };
            board.raise_and_forward(*rank, &failure);
        }
        // In a broken world, every call returns the reason.
        self.barrier()?;
        Err(Error::system(*rank, format!("sharing memory for {what}"), error))
    }
}

/// The list up to the first -1.
fn entries(list: &[i64]) -> &[i64] {
    list.split(|m| *m == -1).next().unwrap_or(&[])
}

/// The error in the members' lists, if any. All members check all lists and get the same answer, so that
/// nobody waits for a member that returned an error.
fn find_list_error(lists: &[&[i64]]) -> Option<String> {
    lists.iter().enumerate().find_map(|(owner, list)| {
        if !list.is_empty() && !list.contains(&(owner as i64)) {
            return Some(format!("list {list:?} of rank {owner} does not contain that rank"));
        }
        list.iter().enumerate().find_map(|(i, member)| {
            if list[..i].contains(member) {
                return Some(format!("list {list:?} contains rank {member} twice"));
            }
            let theirs = lists.get(*member as usize);
            (theirs != Some(list))
                .then(|| format!("rank {member} did not pass the list {list:?} that contains it"))
        })
    })
}

/// Id of a new group: a hash (FNV-1a) of its origin, equal on its members and different for other
/// groups.
fn new_id(parent: u64, count: u32, color: i64) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for word in [parent, u64::from(count), color as u64] {
        for byte in word.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}
