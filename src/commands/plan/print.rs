//! Prints the result of `lockstep plan` as tables, JSON and HTML.

use anyhow::Context;
use lockstep_sim::advice::{batch_remarks, ladder, slow_tensor};
use lockstep_sim::report::{self, Report};
use lockstep_sim::search::{Objective, Proposal, Search, bottlenecks, reasons};
use lockstep_sim::{Cluster, Options};
use serde::Serialize;

pub struct Outcome<'a> {
    pub shown: &'a Proposal,
    /// The best layouts of the search, if there was one.
    pub found: &'a [Proposal],
    pub search: Option<&'a Search<'a>>,
    pub by: Objective,
    pub price: f64,
    pub advice: bool,
    pub chosen: Option<&'a str>,
    pub cluster: &'a Cluster,
    pub options: &'a Options,
}

#[derive(Serialize)]
struct Json {
    #[serde(flatten)]
    shown: Report,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    found: Vec<Report>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasons: Vec<Alternative>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    advice: Vec<AdviceStep>,
}

#[derive(Serialize)]
struct Alternative {
    current: String,
    alternative: String,
    /// Objective relative to the best layout; null if nothing fits.
    ratio: Option<f64>,
    why: String,
}

#[derive(Serialize)]
struct AdviceStep {
    technique: &'static str,
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
        let alternatives = why.iter().flat_map(|reason| {
            reason.alternatives.iter().map(|other| Alternative {
                current: reason.setting.clone(),
                alternative: other.setting.clone(),
                ratio: other.ratio,
                why: other.why.clone(),
            })
        });
        let steps = self
            .search
            .filter(|_| self.advice)
            .map_or(Vec::new(), |search| ladder(search, self.cluster));
        let steps = steps.into_iter().map(|step| AdviceStep {
            technique: step.technique,
            taken: step.taken,
            step_s: step.proposal.as_ref().map(|proposal| proposal.estimate.step_s),
            layout: step
                .proposal
                .as_ref()
                .map(|proposal| lockstep_sim::search::layout_words(&proposal.plan)),
            why: step.why,
        });
        let json = Json {
            shown: Report::of(self.shown, self.cluster),
            found: self.found.iter().map(|proposal| Report::of(proposal, self.cluster)).collect(),
            warnings: self.warnings(),
            limits: bottlenecks(self.shown, self.cluster),
            reasons: alternatives.collect(),
            advice: steps.collect(),
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

    /// Choices of the layout that are likely mistakes, with their cost.
    fn warnings(&self) -> Vec<String> {
        let Proposal { plan, estimate } = self.shown;
        let slow = slow_tensor(plan, self.cluster, self.options, estimate);
        slow.iter().map(ToString::to_string).collect()
    }

    /// Additional sections with titles.
    fn notes(&self) -> Vec<(String, String)> {
        let mut notes = Vec::new();
        let warnings = self.warnings();
        if !warnings.is_empty() {
            notes.push(("warnings".to_string(), list(&warnings)));
        }
        notes.push(("bottlenecks".to_string(), list(&bottlenecks(self.shown, self.cluster))));
        if let (Some(search), [best, ..]) = (self.search, self.found) {
            let stats = search.stats();
            let title = format!(
                "best {} layouts (searched {} groups, {} of them infeasible; {} layouts: {} do not fit, {} estimated)",
                self.found.len(),
                stats.groups,
                stats.infeasible,
                stats.layouts,
                stats.too_large,
                stats.estimated
            );
            let mut table = report::proposals_text(self.found);
            if self.by == Objective::Cost {
                table += &self.costs();
            }
            notes.push((title, table));
            let why = reasons(search, best, self.by);
            notes.push((
                "alternatives: one setting changed at a time (for a degree, other degrees may change by up to 2×)".into(),
                report::reasons_text(&why),
            ));
        }
        if let Some(search) = self.search.filter(|_| self.advice) {
            let steps = ladder(search, self.cluster);
            let title = "advice: techniques in order, each taken (✓) only if it gains at least 3%";
            notes.push((title.into(), report::ladder_text(&steps)));
        }
        if self.search.is_some() {
            notes.extend(self.batch().map(|lines| ("global batch".to_string(), lines)));
        }
        notes
    }

    /// Rank-hours and price of a billion tokens.
    fn costs(&self) -> String {
        let mut text = String::new();
        for proposal in self.found {
            let hours = proposal.plan.ranks as f64 / proposal.estimate.tokens_per_s * 1e9 / 3600.0;
            text += &format!(
                "  {} ranks: {hours:.1} rank-hours per 1e9 tokens, ${:.0} at ${} per rank-hour\n",
                proposal.plan.ranks,
                hours * self.price,
                self.price
            );
        }
        text
    }

    /// Remarks on the batch size. If the pipeline has too few micro-batches, a batch twice as large is considered, which
    /// halves the bubble.
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
