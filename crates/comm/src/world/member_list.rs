//! The member list of a world that is starting: present, missing and duplicate ranks. Pure.

use crate::health::control::Member;
use std::time::Duration;

pub(crate) struct MemberList {
    members: Vec<Option<Member>>,
}

impl MemberList {
    /// A list of `size` ranks of which only rank 0 is present.
    pub(crate) fn new(size: usize, first: Member) -> MemberList {
        let mut members = vec![None; size];
        members[0] = Some(first);
        MemberList { members }
    }

    /// Adds a rank; fails if it is out of range or already present.
    pub(crate) fn add(&mut self, rank: usize, member: Member) -> Result<(), String> {
        let size = self.members.len();
        match self.members.get_mut(rank) {
            None => Err(format!(
                "rank {rank} is out of range: the world has {size} ranks; set the same WORLD_SIZE on \
                 all hosts"
            )),
            Some(Some(other)) => Err(format!(
                "rank {rank} is used twice: by process {} on {} and by process {} on {}; set a different \
                 RANK for every process",
                other.pid, other.host_name, member.pid, member.host_name
            )),
            Some(place) => {
                *place = Some(member);
                Ok(())
            }
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.members.iter().all(Option::is_some)
    }

    pub(crate) fn missing_text(&self, waited: Duration) -> String {
        let missing: Vec<String> = (0..self.members.len())
            .filter(|r| self.members[*r].is_none())
            .map(|r| r.to_string())
            .collect();
        let (all, some) = (self.members.len(), self.members.len() - missing.len());
        format!(
            "{some} of {all} ranks joined within {:.0} s; missing: {}",
            waited.as_secs_f64(),
            missing.join(", ")
        )
    }

    /// All members in rank order; the list must be complete.
    pub(crate) fn into_members(self) -> Vec<Member> {
        self.members.into_iter().map(|m| m.expect("the list is complete")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(pid: u32) -> Member {
        Member { host: "h".into(), host_name: "node1".into(), pid, listens: None }
    }

    #[test]
    fn missing_and_duplicate_ranks_are_named() {
        let mut list = MemberList::new(4, member(1));
        assert_eq!(list.add(2, member(3)), Ok(()));
        let twice = list.add(2, member(9)).unwrap_err();
        assert!(twice.contains("rank 2 is used twice: by process 3 on node1 and by process 9"));
        assert!(list.add(4, member(5)).unwrap_err().contains("WORLD_SIZE"));
        let text = list.missing_text(Duration::from_secs(60));
        assert_eq!(text, "2 of 4 ranks joined within 60 s; missing: 1, 3");
        list.add(1, member(2)).unwrap();
        list.add(3, member(4)).unwrap();
        assert!(list.is_complete());
        let pids: Vec<u32> = list.into_members().iter().map(|m| m.pid).collect();
        assert_eq!(pids, [1, 2, 3, 4]);
    }
}
