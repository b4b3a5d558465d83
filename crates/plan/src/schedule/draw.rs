//! Text drawing of a timeline.

use super::clock::{Span, Timeline};
use std::fmt::Write;

impl Timeline {
    /// One row per rank, one cell per `unit` of time, idle cells as dots. An action is written at its start, as
    /// `F0` or, if ranks have several stages, as `2F0`; starts and ends are rounded to whole cells.
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
        let column = |time: f64| (time / unit).round() as usize * cell;
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
}
