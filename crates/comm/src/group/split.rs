//! Making groups out of a group, and symmetric buffers: everything that all members must do together
//! before they share new memory.

use crate::call::error::{Cause, Error, Failure, Result};
use crate::group::Group;
use crate::group::lane::locals_of;
use crate::group::renumbered;
use crate::memory::arena::Arena;
use crate::memory::segment::{Address, Offer, Segment};
use crate::memory::symmetric::{Allocation, Symmetric};
use crate::world::context::Context;
use lockstep_types::Element;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Group {
    /// Splits the group: members of the same colour form a new one, ordered by key and then by their
    /// order here. All members call it; who gives no colour gets no group.
    ///
    /// ```
    /// # use lockstep_comm::on_threads;
    /// on_threads(4, |world| {
    ///     let colour = (world.rank() % 2) as i64;
    ///     let half = world.split(Some(colour), 0, "half").unwrap().unwrap();
    ///     assert_eq!(half.members(), [world.rank() % 2, world.rank() % 2 + 2]);
    /// });
    /// ```
    pub fn split(&self, colour: Option<i64>, key: i64, name: &str) -> Result<Option<Group>> {
        let own = [i64::from(colour.is_some()), colour.unwrap_or(0), key];
        let mut all = vec![0i64; 3 * self.size()];
        self.all_gather(&own, &mut all)?;
        let mut chosen: Vec<(i64, usize)> = (0..self.size())
            .filter(|&m| colour.is_some() && all[3 * m..3 * m + 2] == own[..2])
            .map(|m| (all[3 * m + 2], m))
            .collect();
        chosen.sort_unstable();
        let members: Vec<usize> = chosen.into_iter().map(|(_, m)| m).collect();
        self.form(&members, colour.unwrap_or(0), name)
    }

    /// Makes groups from lists of members: all members call it, each with the list it belongs to (the
    /// same list on all members it names), or with an empty one.
    pub fn subgroup(&self, members: &[usize], name: &str) -> Result<Option<Group>> {
        // Compared before anything is made: lists that differ would be different groups.
        let mut own = vec![-1i64; self.size() + 1];
        for (slot, member) in own.iter_mut().zip(members) {
            *slot = i64::try_from(*member).unwrap_or(i64::MAX);
        }
        let mut all = vec![0i64; own.len() * self.size()];
        self.all_gather(&own, &mut all)?;
        let lists: Vec<&[i64]> = all.chunks(own.len()).map(entries).collect();
        if let Some(what) = wrong_list(&lists) {
            return Err(Error::Misuse { rank: self.inner.context.rank, what });
        }
        let place = members.iter().position(|m| *m == self.rank());
        let colour = members.iter().min().map(|m| *m as i64);
        self.split(colour, place.unwrap_or(0) as i64, name)
    }

    /// The new group of these members of ours, or nothing if there are none.
    fn form(&self, members: &[usize], colour: i64, name: &str) -> Result<Option<Group>> {
        let inner = &self.inner;
        let id = new_id(inner.id, inner.allocations.load(Ordering::Relaxed), colour);
        #[cfg(feature = "mpi")]
        if inner.engine {
            let group = self.split_mpi(members, id, name)?;
            inner.allocations.fetch_add(1, Ordering::Relaxed);
            return Ok(group);
        }
        let ranks: Vec<usize> = members.iter().map(|m| inner.members[*m]).collect();
        let hosts = renumbered(members.iter().map(|m| inner.hosts[*m]));
        let me = members.iter().position(|m| *m == self.rank());
        let locals = me.map_or(vec![], |me| locals_of(&hosts, hosts[me]));
        let made = if locals.first() == me.as_ref() && me.is_some() {
            Some(Arena::create(locals.len()).or_else(|e| self.no_memory("a group", e))?)
        } else {
            None
        };
        let (arena, offer) = made.map_or((None, None), |(a, o)| (Some(a), Some(o)));
        let addresses = self.exchange_addresses(offer.as_ref())?;
        let group = match me {
            None => None,
            Some(_) => {
                let arena = match arena {
                    Some(arena) => arena,
                    None => Arena::open(addresses[members[locals[0]]], locals.len())
                        .or_else(|e| self.no_memory("a group", e))?,
                };
                Some(Group::over_links(inner.context.clone(), id, name, ranks, &arena))
            }
        };
        self.inner.allocations.fetch_add(1, Ordering::Relaxed);
        // Only when all have it mapped may the offer be withdrawn.
        self.barrier()?;
        drop(offer);
        Ok(group)
    }

    /// A buffer of `len` elements for every member, in memory that all members of the host have
    /// mapped, zero at first. All members call it with the same length.
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
        let locals = locals_of(&inner.hosts, inner.hosts[inner.me]);
        let me = locals.iter().position(|m| *m == inner.me).expect("we are on our own host");
        let stride = (len * size_of::<T>()).next_multiple_of(4096);
        let bytes = stride * locals.len();
        let made = match me {
            0 => Some(Segment::create(bytes).or_else(|e| self.no_memory("a symmetric buffer", e))?),
            _ => None,
        };
        let (segment, offer) = made.map_or((None, None), |(s, o)| (Some(s), Some(o)));
        let addresses = self.exchange_addresses(offer.as_ref())?;
        let segment = match segment {
            Some(segment) => segment,
            None => Segment::open(addresses[locals[0]], bytes).or_else(|e| {
                self.no_memory("a symmetric buffer; do all members ask for the same length?", e)
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

    /// Everybody's address of what it offers, zero for those who offer nothing.
    fn exchange_addresses(&self, offer: Option<&Offer>) -> Result<Vec<Address>> {
        let own = offer.map_or([0, 0], |o| {
            let address = o.address();
            [address.pid as i64, address.fd as i64]
        });
        let mut all = vec![0i64; 2 * self.size()];
        self.all_gather(&own, &mut all)?;
        Ok(all.chunks(2).map(|a| Address { pid: a[0] as u64, fd: a[1] as u64 }).collect())
    }

    /// Memory could not be shared. Mostly its owner has just died, and word of that is on its way;
    /// if none comes, everybody hears of this instead.
    fn no_memory<T>(&self, what: &str, error: std::io::Error) -> Result<T> {
        let Context { rank, board, .. } = &*self.inner.context;
        if board.await_alarm(Duration::from_secs(1)).is_none() {
            let text = format!("rank {rank} cannot share memory for {what}: {error}");
            let failure = Failure { guilty: *rank, cause: Cause::Failed, text };
            board.raise_aloud(*rank, &failure);
        }
        // In a broken world every call says why.
        self.barrier()?;
        Err(Error::system(*rank, format!("sharing memory for {what}"), error))
    }
}

/// A list as it was given: up to the first -1.
fn entries(list: &[i64]) -> &[i64] {
    list.split(|m| *m == -1).next().unwrap_or(&[])
}

/// What is wrong with the lists that the members gave, if anything is. Everybody looks at all of them
/// and comes to the same answer, so that nobody is left waiting for who found a mistake.
fn wrong_list(lists: &[&[i64]]) -> Option<String> {
    lists.iter().enumerate().find_map(|(giver, list)| {
        if !list.is_empty() && !list.contains(&(giver as i64)) {
            return Some(format!("the list {list:?} does not name its own caller {giver}"));
        }
        list.iter().enumerate().find_map(|(i, member)| {
            if list[..i].contains(member) {
                return Some(format!("the list {list:?} names member {member} twice"));
            }
            let theirs = lists.get(*member as usize);
            (theirs != Some(list))
                .then(|| format!("member {member} did not give the list {list:?} that names it"))
        })
    })
}

/// Equal on all members of the new group, and different from every other group's: a hash of where it
/// comes from (FNV-1a).
fn new_id(parent: u64, count: u32, colour: i64) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for word in [parent, u64::from(count), colour as u64] {
        for byte in word.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}
