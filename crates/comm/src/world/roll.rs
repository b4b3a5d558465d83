//! The roll of a world that is forming: who has come, who is missing, who came twice. Pure.

use crate::health::word::Member;
use std::time::Duration;

pub(crate) struct Roll {
    members: Vec<Option<Member>>,
}

impl Roll {
    /// A roll of `size` ranks on which rank 0 is there.
    pub(crate) fn new(size: usize, first: Member) -> Roll {
        let mut members = vec![None; size];
        members[0] = Some(first);
        Roll { members }
    }

    /// A rank comes; an error if it cannot be one of us.
    pub(crate) fn arrive(&mut self, rank: usize, member: Member) -> Result<(), String> {
        let size = self.members.len();
        match self.members.get_mut(rank) {
            None => Err(format!(
                "a process calls itself rank {rank}, but the world has {size} ranks; \
                                 do all hosts say the same WORLD_SIZE?"
            )),
            Some(Some(other)) => Err(format!(
                "rank {rank} is claimed twice: by process {} on {} and by process {} on {}; every \
                 process needs a RANK of its own",
                other.pid, other.host_name, member.pid, member.host_name
            )),
            Some(place) => {
                *place = Some(member);
                Ok(())
            }
        }
    }

    pub(crate) fn complete(&self) -> bool {
        self.members.iter().all(Option::is_some)
    }

    pub(crate) fn missing_text(&self, waited: Duration) -> String {
        let missing: Vec<String> = (0..self.members.len())
            .filter(|r| self.members[*r].is_none())
            .map(|r| r.to_string())
            .collect();
        let (all, some) = (self.members.len(), self.members.len() - missing.len());
        format!(
            "{some} of {all} ranks came within {:.0} s; missing: {}",
            waited.as_secs_f64(),
            missing.join(", ")
        )
    }

    /// All members in order; the roll must be complete.
    pub(crate) fn into_members(self) -> Vec<Member> {
        self.members.into_iter().map(|m| m.expect("the roll is complete")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(pid: u32) -> Member {
        Member { host: "h".into(), host_name: "node1".into(), pid, listens: None }
    }

    #[test]
    fn the_roll_knows_who_is_missing_and_who_came_twice() {
        let mut roll = Roll::new(4, member(1));
        assert_eq!(roll.arrive(2, member(3)), Ok(()));
        let twice = roll.arrive(2, member(9)).unwrap_err();
        assert!(twice.contains("rank 2 is claimed twice: by process 3 on node1 and by process 9"));
        assert!(roll.arrive(4, member(5)).unwrap_err().contains("WORLD_SIZE"));
        let text = roll.missing_text(Duration::from_secs(60));
        assert_eq!(text, "2 of 4 ranks came within 60 s; missing: 1, 3");
        roll.arrive(1, member(2)).unwrap();
        roll.arrive(3, member(4)).unwrap();
        assert!(roll.complete());
        let pids: Vec<u32> = roll.into_members().iter().map(|m| m.pid).collect();
        assert_eq!(pids, [1, 2, 3, 4]);
    }
}
