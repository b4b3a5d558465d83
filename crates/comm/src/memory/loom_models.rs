//! The shared-memory protocols in every interleaving that loom can tell apart, up to a bounded number
//! of preemptions: small worlds that run the very rules of `bell`, `cursors`, `stage` and `alarm`.
//! Run by scripts/loom.sh. The models that must fail show that the others would notice.

use crate::call::error::{Cause, Failure};
use crate::health::alarm::Alarm;
use crate::memory::arena::Seat;
use crate::memory::bell::Bell;
use crate::memory::cursors::{Cursors, GRAIN, ReadEnd, WriteEnd};
use crate::memory::stage::{SLOTS, Window};
use crate::memory::sync::{AtomicU32, Ordering};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::time::Duration;

fn walk(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.check(model);
}

/// Sleeps without a limit, so that a lost wake-up is a deadlock, which loom reports.
fn wait(bell: &Bell, ready: impl Fn() -> bool) {
    while !ready() {
        bell.sleep_unless(&ready, Duration::MAX);
    }
}

/// One sleeper waits for each of `ringers` to set its flag and ring.
fn nobody_sleeps_on(ringers: usize) {
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
fn loom_a_ring_is_not_lost() {
    walk(4, || nobody_sleeps_on(1));
}

#[test]
fn loom_a_ring_of_two_is_not_lost() {
    walk(3, || nobody_sleeps_on(2));
}

/// A ring of two grains; loom reports a race if the rules let two touch one of them.
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
                    // SAFETY: loom checks what the rules promise: we are alone with this grain.
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
                    // SAFETY: loom checks what the rules promise: nobody writes this grain.
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

fn what_is_written_is_read(lengths: &'static [usize]) {
    walk(2, move || {
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
fn loom_a_message_longer_than_the_ring_arrives() {
    what_is_written_is_read(&[5 * GRAIN + 3]);
}

/// A message that ends inside a grain while the reader has not yet skipped the padding of the one
/// before: its own padding then lies past the room that the writer has.
#[test]
fn loom_padding_past_the_room_is_no_room() {
    what_is_written_is_read(&[1, GRAIN + 1, 1, 2]);
}

/// Two seats and their slots, as many as the rules are told or fewer.
struct Table {
    seats: [Seat; 2],
    slots: [Vec<UnsafeCell<u64>>; 2],
}

impl Table {
    fn new(slots: u64) -> Table {
        let row = || (0..slots).map(|_| UnsafeCell::new(0)).collect();
        Table { seats: [Seat::new(), Seat::new()], slots: [row(), row()] }
    }

    fn slot(&self, member: usize, round: u64) -> &UnsafeCell<u64> {
        &self.slots[member][(round % self.slots[member].len() as u64) as usize]
    }

    fn begin(&self, me: usize, round: u64, slots: u64) {
        let peer = &self.seats[1 - me];
        wait(&self.seats[me].bell, || peer.stages[0].has_freed(round, slots));
    }

    fn fill(&self, me: usize, round: u64) {
        self.seats[me].stages[0].fill(round);
        self.seats[1 - me].bell.ring();
    }

    fn peer_filled(&self, me: usize, round: u64) {
        let peer = &self.seats[1 - me];
        wait(&self.seats[me].bell, || peer.stages[0].has_filled(round));
    }

    fn drain(&self, me: usize, round: u64) {
        self.seats[me].stages[0].drain(round);
        self.seats[1 - me].bell.ring();
    }

    fn meet(&self, me: usize, round: u64) {
        self.begin(me, round, SLOTS as u64);
        self.fill(me, round);
        self.peer_filled(me, round);
        self.drain(me, round);
    }

    /// Fills a round before it drains the one before, like the staged collectives; the members in
    /// `speakers` have something to say, and only that is read.
    fn pass_on(&self, me: usize, rounds: u64, slots: u64, speakers: [bool; 2]) {
        let value = |member: usize, round: u64| 100 * (member as u64 + 1) + round;
        for turn in 0..=rounds {
            if turn < rounds {
                self.begin(me, turn, slots);
                if speakers[me] {
                    // SAFETY: loom checks what the rules promise: our slot is free.
                    self.slot(me, turn).with_mut(|slot| unsafe { *slot = value(me, turn) });
                }
                self.fill(me, turn);
            }
            if turn > 0 && speakers[1 - me] {
                self.peer_filled(me, turn - 1);
                // SAFETY: loom checks what the rules promise: the slot is ours to read.
                let seen = self.slot(1 - me, turn - 1).with(|slot| unsafe { *slot });
                assert_eq!(seen, value(1 - me, turn - 1), "a slot of another round");
            }
            if turn > 0 {
                self.drain(me, turn - 1);
            }
        }
    }
}

fn both(table: Table, member: impl Fn(&Table, usize) + Clone + Send + 'static) {
    let table = Arc::new(table);
    let (other, act) = (table.clone(), member.clone());
    let thread = thread::spawn(move || act(&other, 1));
    member(&table, 0);
    thread.join().unwrap();
}

#[test]
fn loom_no_slot_is_filled_while_it_is_read() {
    walk(2, || both(Table::new(2), |table, me| table.pass_on(me, 4, 2, [true, true])));
}

#[test]
fn loom_no_slot_is_filled_while_it_is_read_if_one_only_listens() {
    walk(2, || both(Table::new(2), |table, me| table.pass_on(me, 5, 2, [true, false])));
}

#[test]
#[should_panic(expected = "a slot of another round")]
fn loom_a_slot_too_few_is_noticed() {
    walk(2, || both(Table::new(2), |table, me| table.pass_on(me, 5, 3, [true, false])));
}

/// Operations that are nothing but an announcement and a meeting: nothing else holds members back
/// from the next announcement. `step` 1 alternates between the two postings.
fn announce_and_compare(table: &Table, me: usize, step: u64) {
    let stamp = |member: usize, n: u64| [n, member as u64, n + 7, n * n, n + 1, n + 2];
    let window = |n: u64| Window { pid: 1, symmetric: n as u32, at: 64 * n, offset: n };
    for n in 1..=3 {
        table.seats[me].postings.announce(step * n, stamp(me, n), window(n));
        table.meet(me, n - 1);
        let theirs = &table.seats[1 - me].postings;
        assert_eq!(theirs.stamp(step * n), stamp(1 - me, n), "another operation's posting");
        assert_eq!(theirs.window(step * n), window(n), "another operation's posting");
    }
}

#[test]
fn loom_two_postings_are_enough() {
    walk(2, || both(Table::new(0), |table, me| announce_and_compare(table, me, 1)));
}

#[test]
#[should_panic(expected = "another operation's posting")]
fn loom_one_posting_is_too_few() {
    walk(2, || both(Table::new(0), |table, me| announce_and_compare(table, me, 2)));
}

/// Two ranks raise at the same time while a third looks.
fn the_first_alarm_stands(alarm: Alarm) {
    let failures = [
        Failure { guilty: 1, cause: Cause::Died, text: "ab".into() },
        Failure { guilty: 2, cause: Cause::Late, text: "c".into() },
    ];
    let alarm = Arc::new(alarm);
    let raisers = failures.clone().map(|failure| {
        let alarm = alarm.clone();
        thread::spawn(move || alarm.raise(&failure))
    });
    let early = alarm.standing();
    let said = raisers.map(|raiser| raiser.join().unwrap());
    let stands = alarm.standing().expect("it was raised");
    assert!(failures.contains(&stands));
    assert!(early.is_none_or(|seen| seen == stands));
    assert_eq!(said, [stands.clone(), stands]);
}

#[test]
fn loom_the_first_alarm_stands_and_is_seen_whole() {
    walk(3, || the_first_alarm_stands(Alarm::new()));
}

/// The one whose record is lost to the dead has to wait for the other.
#[test]
fn loom_the_first_alarm_stands_if_one_died_before_it() {
    walk(2, || {
        let alarm = Alarm::new();
        alarm.claim();
        the_first_alarm_stands(alarm);
    });
}
