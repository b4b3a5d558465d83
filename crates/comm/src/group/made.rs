//! How a group comes to be: over our own links, or over whatever an engine carries.

use super::carrier::Carrier;
use super::lane::{Lane, LaneParts, locals_of};
use super::track::Track;
use super::{Group, Inner};
use crate::link::messages::{MessageParts, Messages};
use crate::memory::arena::Arena;
use crate::memory::symmetric::Registry;
use crate::world::context::Context;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

impl Group {
    /// A group over our own links; `arena` is the memory it shares on this host.
    pub(crate) fn over_links(
        context: Arc<Context>,
        id: u64,
        name: &str,
        members: Vec<usize>,
        arena: &Arena,
    ) -> Group {
        let me = members.iter().position(|r| *r == context.rank).expect("we are a member");
        let members: Arc<[usize]> = members.into();
        let hosts: Arc<[usize]> = renumbered(members.iter().map(|r| context.hosts[*r])).into();
        let registry = Arc::new(Registry::default());
        let locals = locals_of(&hosts, hosts[me]);
        let seats: Vec<Option<usize>> =
            (0..members.len()).map(|m| locals.iter().position(|l| *l == m)).collect();
        let messages = Messages::new(&MessageParts {
            group: id,
            me,
            members: &members,
            seats: &seats,
            arena,
            sockets: context.sockets.as_ref(),
        });
        let lane = Lane::new(LaneParts {
            group: id,
            me,
            members: members.clone(),
            hosts: hosts.clone(),
            arena: arena.clone(),
            sockets: context.sockets.clone(),
            registry: registry.clone(),
            direct_access: context.direct_access.clone(),
            may_pull: context.may_pull.clone(),
            heaps: context.heaps.clone(),
        });
        let carrier = Carrier::Lane(Box::new(lane));
        Group::new(context, id, name, members, me, hosts, carrier, messages, registry)
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "the one constructor, called from two places here"
    )]
    pub(crate) fn new(
        context: Arc<Context>,
        id: u64,
        name: &str,
        members: Arc<[usize]>,
        me: usize,
        hosts: Arc<[usize]>,
        carrier: Carrier,
        messages: Messages,
        registry: Arc<Registry>,
    ) -> Group {
        let inner = Inner {
            context,
            id,
            name: name.into(),
            members,
            me,
            hosts,
            engine: carrier.is_engine(),
            track: Arc::new(Track::new(carrier)),
            messages,
            registry,
            allocations: AtomicU32::new(0),
            sent_messages: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
            choices: Mutex::default(),
        };
        Group { inner: Arc::new(inner), forced: None }
    }
}

/// Numbers from 0, in order of appearance, for hosts named in whatever way.
pub(crate) fn renumbered<H: PartialEq>(hosts: impl Iterator<Item = H>) -> Vec<usize> {
    let mut seen: Vec<H> = Vec::new();
    hosts
        .map(|host| {
            seen.iter().position(|h| *h == host).unwrap_or_else(|| {
                seen.push(host);
                seen.len() - 1
            })
        })
        .collect()
}
