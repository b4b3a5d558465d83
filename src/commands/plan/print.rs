//! What `plan` has found, as tables, as JSON and as a page.

use anyhow::Context;
use lockstep_sim::Cluster;
use lockstep_sim::advice::{batch_remarks, ladder};
use lockstep_sim::report::{self, Report};
use lockstep_sim::search::{Objective, Proposal, Search, limit, reasons};
use serde::Serialize;

pub struct Outcome<'a> {
    pub shown: &'a Proposal,
    /// The best, where they were looked for.
    pub found: &'a [Proposal],
    pub search: Option<&'a Search<'a>>,
    pub by: Objective,
    pub price: f64,
    pub advice: bool,
    pub chosen: Option<&'a str>,
    pub cluster: &'a Cluster,
}

#[derive(Serialize)]
struct Json {
    #[serde(flatten)]
    shown: Report,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    found: Vec<Report>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasons: Vec<Turn>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    advice: Vec<LadderStep>,
}

#[derive(Serialize)]
struct Turn {
    stands: String,
    turned: String,
    /// Of the best one's value; nothing where nothing fits.
    times: Option<f64>,
    why: String,
}

#[derive(Serialize)]
struct LadderStep {
    means: &'static str,
    taken: bool,
    step_s: Option<f64>,
    layout: Option<String>,
    why: String,
}

impl Outcome<'_> {
    pub fn text(&self) {
        if let Some(chosen) = self.chosen {
            println!("{chosen}");
        }
        print!("{}", report::text(self.shown, self.cluster));
        for (title, text) in self.notes() {
            println!("\n{title}\n{}", text.trim_end());
        }
    }

    pub fn html(&self) -> String {
        let notes = self.notes();
        let notes: Vec<(&str, String)> =
            notes.iter().map(|(title, text)| (title.as_str(), text.clone())).collect();
        report::html(self.shown, self.cluster, &notes)
    }

    pub fn json(&self) -> anyhow::Result<()> {
        let why = if self.found.is_empty() { Vec::new() } else { self.reasons() };
        let turns = why.iter().flat_map(|reason| {
            reason.turns.iter().map(|turn| Turn {
                stands: reason.typed.clone(),
                turned: turn.typed.clone(),
                times: turn.times,
                why: turn.why.clone(),
            })
        });
        let rungs = self
            .search
            .filter(|_| self.advice)
            .map_or(Vec::new(), |search| ladder(search, self.cluster));
        let rungs = rungs.into_iter().map(|rung| LadderStep {
            means: rung.means,
            taken: rung.taken,
            step_s: rung.proposal.as_ref().map(|proposal| proposal.estimate.step_s),
            layout: rung
                .proposal
                .as_ref()
                .map(|proposal| lockstep_sim::search::layout_words(&proposal.plan)),
            why: rung.why,
        });
        let json = Json {
            shown: Report::of(self.shown, self.cluster),
            found: self.found.iter().map(|proposal| Report::of(proposal, self.cluster)).collect(),
            limits: limit(self.shown, self.cluster),
            reasons: turns.collect(),
            advice: rungs.collect(),
        };
        println!("{}", serde_json::to_string(&json).context("a report is plain data")?);
        Ok(())
    }

    fn reasons(&self) -> Vec<lockstep_sim::search::Reason> {
        match (self.search, self.found.first()) {
            (Some(search), Some(best)) => reasons(search, best, self.by),
            _ => Vec::new(),
        }
    }

    /// What is told besides the plan itself, with titles.
    fn notes(&self) -> Vec<(String, String)> {
        let mut notes =
            vec![("what limits it".to_string(), list(&limit(self.shown, self.cluster)))];
        if let (Some(search), [best, ..]) = (self.search, self.found) {
            let looked = search.looked();
            let title = format!(
                "the best {} of all layouts ({} groups, {} never fit; {} layouts opened, {} too large, {} estimated)",
                self.found.len(),
                looked.groups,
                looked.infeasible,
                looked.layouts,
                looked.too_large,
                looked.estimated
            );
            let mut table = report::proposals_text(self.found);
            if self.by == Objective::Cost {
                table += &self.costs();
            }
            notes.push((title, table));
            let why = reasons(search, best, self.by);
            notes.push((
                "why: one turn of each knob; when it is a degree, with the others half to twice as large".into(),
                report::reasons_text(&why),
            ));
        }
        if let Some(search) = self.search.filter(|_| self.advice) {
            let rungs = ladder(search, self.cluster);
            let title = "the ladder: each means only where the ones before leave something to gain";
            notes.push((title.into(), report::ladder_text(&rungs)));
        }
        if self.search.is_some() {
            notes.extend(self.batch().map(|lines| ("on the global batch".to_string(), lines)));
        }
        notes
    }

    /// Rank-hours and money for a billion tokens.
    fn costs(&self) -> String {
        let mut text = String::new();
        for proposal in self.found {
            let hours = proposal.plan.ranks as f64 / proposal.estimate.tokens_per_s * 1e9 / 3600.0;
            text += &format!(
                "  {} ranks: {hours:.1} rank-hours for 1e9 tokens, {:.0} dollars at {} an hour\n",
                proposal.plan.ranks,
                hours * self.price,
                self.price
            );
        }
        text
    }

    /// Where stages wait for want of micro-batches, a batch twice as large halves that; what it asks for.
    fn batch(&self) -> Option<String> {
        let Proposal { plan, estimate } = self.shown;
        let starved = estimate.time.bubble > 0.1 * estimate.step_s
            || plan.train.accumulation < plan.layout.pipe;
        let grown = if starved { 2 * plan.train.global_batch } else { plan.train.global_batch };
        batch_remarks(plan, grown).map(|remarks| list(&remarks.lines))
    }
}

fn list(lines: &[String]) -> String {
    lines.iter().map(|line| format!("  {line}\n")).collect()
}
