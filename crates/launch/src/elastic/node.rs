//! A node at its captain's word: generations are started as told, and how they end is told back. Decides nothing
//! about the job; only its own ranks are its own.

use std::sync::mpsc::{Receiver, Sender};

use super::words::{How, Said};
use crate::events::{Event, Order, Share};
use crate::generation::{self, Ended};
use crate::{Failure, LaunchError, LaunchSpec, output};
use lockstep_comm::token;

/// Why a node no longer serves.
pub(crate) enum Parted {
    /// The job is over for this node.
    Bye { code: i32, text: String },
    /// The captain is out of reach.
    Lost,
    /// Somebody insists that the launcher ends now.
    Signalled(i32),
}

/// What a node remembers from generation to generation.
#[derive(Default)]
pub(crate) struct Memory {
    pub generation: u32,
    pub failure: Option<Failure>,
    pub interrupted: Option<i32>,
}

/// The most of a failure's text that is sent.
const LONGEST_TEXT: usize = 8 << 10;

/// Serves until the captain says goodbye or is lost. Ranks are bound to the calling thread.
pub(crate) fn serve(
    spec: &LaunchSpec,
    shared_token: Option<&str>,
    (sender, events): (&Sender<Event>, &Receiver<Event>),
    tell: &dyn Fn(Said),
    memory: &mut Memory,
) -> Result<Parted, LaunchError> {
    while let Ok(event) = events.recv() {
        let mut orders = vec![];
        match event {
            // A straggler of a generation that was given up.
            Event::Exited { .. } => {}
            Event::Signalled(signal) => {
                if memory.interrupted.replace(signal).is_some() {
                    return Ok(Parted::Signalled(signal));
                }
                tell(Said::Leaving { signal });
            }
            Event::Told(Order::Start(share)) => {
                let ended = generation(spec, shared_token, share, (sender, events), tell, memory)?;
                orders = ended.later;
            }
            Event::Told(order) => orders.push(order),
        }
        for order in orders {
            match order {
                Order::Bye { code, text } => return Ok(Parted::Bye { code, text }),
                Order::Lost => return Ok(Parted::Lost),
                // There are no ranks that could stop.
                Order::Stop | Order::End | Order::Start(_) => {}
            }
        }
    }
    Ok(Parted::Lost)
}

fn generation(
    spec: &LaunchSpec,
    shared_token: Option<&str>,
    share: Share,
    events: (&Sender<Event>, &Receiver<Event>),
    tell: &dyn Fn(Said),
    memory: &mut Memory,
) -> Result<Ended, LaunchError> {
    // On one node nobody else has to know the token, so a straggler of the last generation cannot join this one.
    let token = match shared_token {
        Some(token) => token.to_string(),
        None => token::random()
            .map_err(|cause| LaunchError::System { act: "read /dev/urandom", cause })?,
    };
    let (generation, first_rank) = (share.generation, share.first_rank);
    let on_signal = |signal| tell(Said::Leaving { signal });
    let ended = generation::run(spec, share, token, events, &on_signal)?;
    memory.generation = generation;
    memory.interrupted = memory.interrupted.or(ended.interrupted);
    memory.failure = ended.failure.clone();
    if let Some(failure) = &ended.failure {
        output::say(&failure.to_string());
    }
    tell(Said::Ended { generation, how: how(&ended, first_rank) });
    Ok(ended)
}

fn how(ended: &Ended, first_rank: usize) -> How {
    match &ended.failure {
        Some(failure) => How::Failed {
            local_rank: failure.rank - first_rank,
            code: failure.ending.exit_code(),
            hopeless: ended.hopeless(),
            text: shortened(failure.to_string()),
        },
        None if ended.done() => How::Done,
        None if ended.orderly() => How::Stopped,
        None => How::Cut,
    }
}

fn shortened(mut text: String) -> String {
    if text.len() > LONGEST_TEXT {
        let end = (0..=LONGEST_TEXT).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}
