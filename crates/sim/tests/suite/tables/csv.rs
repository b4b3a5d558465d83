//! CSV files.

/// Cells of a row by column name.
pub struct Cells {
    names: Vec<String>,
    cells: Vec<String>,
}

impl Cells {
    pub fn text(&self, name: &str) -> &str {
        let at = self.names.iter().position(|known| known == name);
        &self.cells[at.unwrap_or_else(|| panic!("no column {name} in {:?}", self.names))]
    }

    pub fn count(&self, name: &str) -> usize {
        self.text(name).parse().unwrap_or_else(|_| panic!("{name}={} is no count", self.text(name)))
    }

    pub fn number(&self, name: &str) -> Option<f64> {
        self.text(name).parse().ok()
    }
}

/// All rows of a file.
pub fn read(text: &str) -> Vec<Cells> {
    let mut lines = text.lines().map(split);
    let names = lines.next().expect("a file has a first line");
    lines.map(|cells| Cells { names: names.clone(), cells }).collect()
}

/// Splits a line; quoted cells may contain commas.
fn split(line: &str) -> Vec<String> {
    let (mut cells, mut quoted) = (vec![String::new()], false);
    for letter in line.chars() {
        match letter {
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(String::new()),
            other => cells.last_mut().expect("never empty").push(other),
        }
    }
    cells
}
