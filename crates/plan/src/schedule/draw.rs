//! Text drawing of a timeline.

use super::clock::{Span, Timeline};
use std::collections::HashMap;
use std::fmt::Write;

impl Timeline {
    /// One row per rank, one cell per `unit` of time, idle cells as dots. An action is written at its start, as
    /// `F0` or, if ranks have several stages, as `2F0`. Starts and ends are rounded to whole cells, but every action
    /// has room for its label: where actions are shorter than a cell, time is stretched for all ranks.
    ///
    /// # Panics
    /// If `unit` is not positive.
    pub fn draw(&self, unit: f64) -> String {
        assert!(unit > 0.0, "a cell lasts {unit}, which is no time");
        let several = self
            .ranks
            .iter()
            .any(|spans| spans.iter().any(|span| span.action.stage != spans[0].action.stage));
        let label = |span: &Span| match (several, span.action) {
            (true, action) => action.to_string(),
            (false, action) => format!("{}{}", action.act.letter(), action.micro),
        };
        let longest = self.ranks.iter().flatten().map(|span| label(span).len()).max();
        let cell = longest.unwrap_or(0) + 1;
        let columns = self
            .columns(|time| (time / unit).round() as usize * cell, |span| label(span).len() + 1);
        let column = |time: f64| columns[&time.to_bits()];
        let names = self.ranks.len().saturating_sub(1).to_string().len();

        let mut drawn = String::new();
        for (rank, spans) in self.ranks.iter().enumerate() {
            let mut row = vec!['.'; column(self.makespan())];
            for span in spans {
                let cells = &mut row[column(span.start)..column(span.end)];
                cells.fill(' ');
                cells.iter_mut().zip(label(span).chars()).for_each(|(at, letter)| *at = letter);
            }
            let row: String = row.into_iter().collect();
            writeln!(drawn, "rank {rank:>names$}  {}", row.trim_end()).expect("a string takes all");
        }
        drawn
    }

    /// The column of every start and end: at least `scaled`, and every action has at least its `room`.
    fn columns(
        &self,
        scaled: impl Fn(f64) -> usize,
        room: impl Fn(&Span) -> usize,
    ) -> HashMap<u64, usize> {
        let mut spans: Vec<&Span> =
            self.ranks.iter().flatten().filter(|span| span.end > span.start).collect();
        spans.sort_by(|a, b| a.end.total_cmp(&b.end));
        let all = self.ranks.iter().flatten();
        let mut times: Vec<f64> = all.flat_map(|span| [span.start, span.end]).collect();
        times.push(0.0);
        times.sort_by(f64::total_cmp);
        let mut ended = spans.into_iter().peekable();
        let (mut columns, mut last) = (HashMap::new(), 0);
        for time in times {
            last = last.max(scaled(time));
            while let Some(span) = ended.next_if(|span| span.end <= time) {
                last = last.max(columns[&span.start.to_bits()] + room(span));
            }
            columns.insert(time.to_bits(), last);
        }
        columns
    }
}
