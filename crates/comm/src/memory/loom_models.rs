//! Loom models of the shared-memory protocols: checks `bell`, `cursors`, `member` and `alarm` in every
//! interleaving up to a bounded number of preemptions. Run by scripts/loom.sh. The models that must fail
//! show that the others would detect an error.

use crate::call::error::{Cause, Failure};
use crate::health::alarm::Alarm;
use crate::memory::bell::Bell;
use crate::memory::cursors::{Cursors, GRAIN, ReadEnd, WriteEnd};
use crate::memory::member::{BufferLocation, MemberBlock, SLOTS};
use crate::memory::sync::{AtomicU32, Ordering};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::time::Duration;

fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.check(model);
}

/// Sleeps without a limit, so that loom reports a lost wake-up as a deadlock.
fn wait(bell: &Bell, ready: impl Fn() -> bool) {
    while !ready() {
        bell.sleep_unless(&ready, Duration::MAX);
    }
}

/// One sleeper waits for each of `ringers` threads to set its flag and ring.
fn wake_up_arrives(ringers: usize) {
    let bell = Arc::new(Bell::new());
    let flags = Arc::new([0; 2].map(AtomicU32::new));
    for i in 0..ringers {
        let (bell, flags) = (bell.clone(), flags.clone());
        thread::spawn(move || {
            flags[i].store(1, Ordering::Release);
            bell.ring();
        });
    }
    for flag in &flags[..ringers] {
        wait(&bell, || flag.load(Ordering::Acquire) == 1);
    }
}

#[test]
fn loom_one_ring_is_not_lost() {
    explore(4, || wake_up_arrives(1));
}

#[test]
fn loom_two_rings_are_not_lost() {
    explore(3, || wake_up_arrives(2));
}

/// A ring buffer of two grains; loom reports a race if both sides access one grain.
struct Pipe {
    cursors: Cursors,
    grains: [UnsafeCell<[u8; GRAIN]>; 2],
    writer_bell: Bell,
    reader_bell: Bell,
}

const CAPACITY: usize = 2 * GRAIN;

impl Pipe {
    fn new() -> Pipe {
        Pipe {
            cursors: Cursors::new(),
            grains: [UnsafeCell::new([0; GRAIN]), UnsafeCell::new([0; GRAIN])],
            writer_bell: Bell::new(),
            reader_bell: Bell::new(),
        }
    }

    fn write(&self, messages: &[Vec<u8>]) {
        let mut end = WriteEnd::new(CAPACITY);
        for message in messages {
            let mut done = 0;
            while done < message.len() {
                let place = end.next(&self.cursors, message.len() - done);
                if place.is_empty() {
                    wait(&self.writer_bell, || end.room(&self.cursors) > 0);
                    continue;
                }
                for (i, at) in place.clone().enumerate().step_by(GRAIN) {
                    let n = (GRAIN - at % GRAIN).min(place.len() - i);
                    let piece = &message[done + i..done + i + n];
                    // SAFETY: checked by loom: the protocol gives us exclusive access to this grain.
                    self.grains[at / GRAIN].with_mut(|grain| unsafe {
                        (&mut (*grain))[at % GRAIN..at % GRAIN + n].copy_from_slice(piece);
                    });
                }
                done += place.len();
                end.publish(&self.cursors, place.len());
                self.reader_bell.ring();
            }
            end.pad(&self.cursors);
            self.reader_bell.ring();
        }
    }

    fn read(&self, lengths: &[usize]) -> Vec<Vec<u8>> {
        let mut end = ReadEnd::new(CAPACITY);
        let mut messages = Vec::new();
        for &len in lengths {
            let mut message = Vec::new();
            while message.len() < len {
                let left = len - message.len();
                let place = end.next(&self.cursors, left);
                if place.is_empty() {
                    wait(&self.reader_bell, || end.has_some(&self.cursors, left));
                    continue;
                }
                for at in place.clone().step_by(GRAIN) {
                    let n = GRAIN.min(place.end - at);
                    // SAFETY: checked by loom: nobody writes this grain.
                    self.grains[at / GRAIN]
                        .with(|grain| message.extend_from_slice(unsafe { &(&(*grain))[..n] }));
                }
                end.release(&self.cursors, place.len());
                self.writer_bell.ring();
            }
            end.skip_padding(&self.cursors);
            self.writer_bell.ring();
            messages.push(message);
        }
        messages
    }
}

fn written_bytes_are_read(lengths: &'static [usize]) {
    explore(2, move || {
        let message = |(i, &len): (usize, &usize)| (0..len).map(|j| (17 * i + j) as u8).collect();
        let messages: Vec<Vec<u8>> = lengths.iter().enumerate().map(message).collect();
        let pipe = Arc::new(Pipe::new());
        let (writing, sent) = (pipe.clone(), messages.clone());
        let writer = thread::spawn(move || writing.write(&sent));
        assert_eq!(pipe.read(lengths), messages);
        writer.join().unwrap();
    });
}

#[test]
fn loom_a_message_longer_than_the_ring_is_received() {
    written_bytes_are_read(&[5 * GRAIN + 3]);
}

/// A message ends inside a grain while the reader has not yet skipped the padding of the previous one: its
/// own padding is then past the free space of the writer.
#[test]
fn loom_padding_past_the_free_space_is_not_free() {
    written_bytes_are_read(&[1, GRAIN + 1, 1, 2]);
}

/// Two members and their slots; as many as the protocol assumes, or fewer.
struct Members {
    blocks: [MemberBlock; 2],
    slots: [Vec<UnsafeCell<u64>>; 2],
}

impl Members {
    fn new(slots: u64) -> Members {
        let row = || (0..slots).map(|_| UnsafeCell::new(0)).collect();
        Members { blocks: [MemberBlock::new(), MemberBlock::new()], slots: [row(), row()] }
    }

    fn slot(&self, member: usize, round: u64) -> &UnsafeCell<u64> {
        &self.slots[member][(round % self.slots[member].len() as u64) as usize]
    }

    fn begin(&self, me: usize, round: u64, slots: u64) {
        let peer = &self.blocks[1 - me];
        wait(&self.blocks[me].bell, || peer.counters[0].has_freed(round, slots));
    }

    fn fill(&self, me: usize, round: u64) {
        self.blocks[me].counters[0].fill(round);
        self.blocks[1 - me].bell.ring();
    }

    fn peer_filled(&self, me: usize, round: u64) {
        let peer = &self.blocks[1 - me];
        wait(&self.blocks[me].bell, || peer.counters[0].has_filled(round));
    }

    fn drain(&self, me: usize, round: u64) {
        self.blocks[me].counters[0].drain(round);
        self.blocks[1 - me].bell.ring();
    }

    fn barrier(&self, me: usize, round: u64) {
        self.begin(me, round, SLOTS as u64);
        self.fill(me, round);
        self.peer_filled(me, round);
        self.drain(me, round);
    }

    /// Fills each round before it drains the previous one, like the collectives through slots. Only the
    /// slots of members in `senders` are written and read.
    fn pass_data(&self, me: usize, rounds: u64, slots: u64, senders: [bool; 2]) {
        let value = |member: usize, round: u64| 100 * (member as u64 + 1) + round;
        for turn in 0..=rounds {
            if turn < rounds {
                self.begin(me, turn, slots);
                if senders[me] {
                    // SAFETY: checked by loom: our slot is free.
                    self.slot(me, turn).with_mut(|slot| unsafe { *slot = value(me, turn) });
                }
                self.fill(me, turn);
            }
            if turn > 0 && senders[1 - me] {
                self.peer_filled(me, turn - 1);
                // SAFETY: checked by loom: we may read the slot.
                let seen = self.slot(1 - me, turn - 1).with(|slot| unsafe { *slot });
                assert_eq!(seen, value(1 - me, turn - 1), "a slot of another round");
            }
            if turn > 0 {
                self.drain(me, turn - 1);
            }
        }
    }
}

fn run_both(members: Members, member: impl Fn(&Members, usize) + Clone + Send + 'static) {
    let members = Arc::new(members);
    let (shared, second) = (members.clone(), member.clone());
    let thread = thread::spawn(move || second(&shared, 1));
    member(&members, 0);
    thread.join().unwrap();
}

#[test]
fn loom_no_slot_is_filled_while_it_is_read() {
    explore(2, || {
        run_both(Members::new(2), |members, me| members.pass_data(me, 4, 2, [true, true]))
    });
}

#[test]
fn loom_no_slot_is_filled_while_it_is_read_if_one_only_receives() {
    explore(2, || {
        run_both(Members::new(2), |members, me| members.pass_data(me, 5, 2, [true, false]))
    });
}

#[test]
#[should_panic(expected = "a slot of another round")]
fn loom_one_slot_too_few_is_detected() {
    explore(2, || {
        run_both(Members::new(2), |members, me| members.pass_data(me, 5, 3, [true, false]))
    });
}

/// Operations that consist of an announcement and a barrier only, so that nothing else delays the next
/// announcement. `step` 1 alternates between the two postings.
fn announce_and_compare(members: &Members, me: usize, step: u64) {
    let stamp = |member: usize, n: u64| [n, member as u64, n + 7, n * n, n + 1, n + 2];
    let location =
        |n: u64| BufferLocation { pid: 1, allocation: n as u32, address: 64 * n, offset: n };
    for n in 1..=3 {
        members.blocks[me].postings.announce(step * n, stamp(me, n), location(n));
        members.barrier(me, n - 1);
        let theirs = &members.blocks[1 - me].postings;
        assert_eq!(theirs.stamp(step * n), stamp(1 - me, n), "another operation's posting");
        assert_eq!(theirs.location(step * n), location(n), "another operation's posting");
    }
}

#[test]
fn loom_two_postings_suffice() {
    explore(2, || run_both(Members::new(0), |members, me| announce_and_compare(members, me, 1)));
}

#[test]
#[should_panic(expected = "another operation's posting")]
fn loom_one_posting_does_not_suffice() {
    explore(2, || run_both(Members::new(0), |members, me| announce_and_compare(members, me, 2)));
}

/// Two ranks raise an alarm at the same time while a third reads it.
fn the_first_alarm_wins(alarm: Alarm) {
    let failures = [
        Failure { culprit: 1, cause: Cause::Died, text: "ab".into() },
        Failure { culprit: 2, cause: Cause::Late, text: "c".into() },
    ];
    let alarm = Arc::new(alarm);
    let raisers = failures.clone().map(|failure| {
        let alarm = alarm.clone();
        thread::spawn(move || alarm.raise(&failure))
    });
    let early = alarm.failure();
    let returned = raisers.map(|raiser| raiser.join().unwrap());
    let winner = alarm.failure().expect("it was raised");
    assert!(failures.contains(&winner));
    assert!(early.is_none_or(|seen| seen == winner));
    assert_eq!(returned, [winner.clone(), winner]);
}

#[test]
fn loom_the_first_alarm_wins_and_is_read_completely() {
    explore(3, || the_first_alarm_wins(Alarm::new()));
}

/// The raiser without a record, because a dead rank claimed one, waits for the other.
#[test]
fn loom_the_first_alarm_wins_if_a_rank_died_while_raising() {
    explore(2, || {
        let alarm = Alarm::new();
        alarm.claim();
        the_first_alarm_wins(alarm);
    });
}
