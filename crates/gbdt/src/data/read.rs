//! One file → the table of one rank.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use lockstep_comm::{Group, Op};
use lockstep_kernels::Team;
use serde::{Deserialize, Serialize};

use crate::collective::{all_succeed, gather_bytes};
use crate::data::npy::Array;
use crate::data::piece::{Piece, group_id};
use crate::data::schema::{Role, Schema};
use crate::data::spill::Spill;
use crate::data::table::{Chunk, Store, Table, Values};
use crate::data::text::{GroupOf, Problem, TextFile, line_start, part_of};
use crate::data::{csv, libsvm};
use crate::error::{Error, Result};
use crate::par;

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    Csv,
    Libsvm,
    Npy,
    /// Needs the cargo feature `parquet`.
    Parquet,
    /// Arrow IPC, as a file or a stream. Needs the cargo feature `arrow`.
    Arrow,
}

impl Format {
    /// The format of a file name.
    pub fn of(path: &Path) -> Result<Format> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("csv" | "tsv" | "txt") => Ok(Format::Csv),
            Some("libsvm" | "svm" | "svmlight") => Ok(Format::Libsvm),
            Some("npy") => Ok(Format::Npy),
            Some("parquet") => Ok(Format::Parquet),
            Some("arrow" | "arrows" | "feather" | "ipc") => Ok(Format::Arrow),
            _ => Err(Error::file(
                path,
                "the format is not known from the file name; set data.format to csv, libsvm, npy, parquet or arrow",
            )),
        }
    }
}

/// How to read a file.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    pub schema: &'a Schema,
    /// Default: from the file name.
    pub format: Option<Format>,
    /// Whether a label is required.
    pub labeled: bool,
    pub team: &'a Team,
    /// Place for the values of dense text that do not fit in memory. `None` keeps all values in memory.
    pub spill: Option<SpillTo<'a>>,
    /// Categories of a model, by feature name. Other values are missing. Default: those of the file.
    pub categories: Option<&'a BTreeMap<String, Vec<String>>>,
}

/// Where large text is parsed to.
#[derive(Clone, Copy)]
pub struct SpillTo<'a> {
    pub folder: &'a Path,
    /// Files of more bytes than this are spilled.
    pub above: u64,
}

/// Bytes of text that a thread parses at a time.
const PIECE_BYTES: usize = 4 << 20;

/// Reads the rows of this rank: consecutive rows of the file, in rank order. Rows of one group stay on one rank.
/// Collective.
pub fn read(group: &Group, path: &Path, reader: &Reader<'_>) -> Result<Table> {
    let part = (group.rank(), group.size());
    let local =
        reader.format.map_or_else(|| Format::of(path), Ok).and_then(|format| match format {
            Format::Csv => read_csv(path, reader, part),
            Format::Libsvm => read_libsvm(path, reader, part),
            Format::Npy => read_npy(path, reader, part),
            Format::Parquet => read_parquet(path, reader, part),
            Format::Arrow => read_arrow(path, reader, part),
        });
    let Local { mut table, words } = all_succeed(group, local)?;
    // Ranks may have seen different columns of a sparse file.
    let mut columns = [table.names.len() as i64];
    group.all_reduce(&mut columns, Op::Max)?;
    let columns = reader.schema.features.unwrap_or(0).max(columns[0] as usize);
    if table.names.len() < columns {
        table.names = Table::numbered(columns);
    }
    table.categories.resize(table.names.len(), None);
    for name in &reader.schema.categorical {
        let feature = table.names.iter().position(|other| other == name);
        let feature = feature.ok_or_else(|| {
            Error::file(path, format!("there is no feature {name:?} (data.categorical)"))
        })?;
        let known = match reader.categories.and_then(|all| all.get(name)) {
            Some(known) => known.clone(),
            None => all_words(group, &words, feature)?,
        };
        let index: BTreeMap<&[u8], usize> =
            known.iter().enumerate().map(|(code, word)| (word.as_bytes(), code)).collect();
        for (chunk, words) in table.chunks.iter_mut().zip(&words) {
            if let Some(words) = words.get(&feature) {
                let code =
                    |word: &Vec<u8>| index.get(&word[..]).map_or(f32::NAN, |code| *code as f32);
                chunk.codes.insert(feature, words.iter().map(code).collect());
            }
        }
        table.categories[feature] = Some(known);
    }
    all_succeed(group, check(path, &table, reader))?;
    Ok(table)
}

/// Words of a feature on all ranks, in lexicographic order.
fn all_words(
    group: &Group,
    words: &[BTreeMap<usize, Vec<Vec<u8>>>],
    feature: usize,
) -> Result<Vec<String>> {
    let mut mine = BTreeSet::new();
    for words in words.iter().filter_map(|words| words.get(&feature)).flatten() {
        mine.insert(String::from_utf8_lossy(words).into_owned());
    }
    let text = serde_json::to_vec(&mine).expect("plain data");
    let mut all = BTreeSet::new();
    for text in gather_bytes(group, &text)? {
        let theirs: Vec<String> = serde_json::from_slice(&text).map_err(|error| {
            Error::Input(format!("invalid categories from another rank: {error}"))
        })?;
        all.extend(theirs);
    }
    Ok(all.into_iter().collect())
}

fn check(path: &Path, table: &Table, reader: &Reader<'_>) -> Result<()> {
    let rows = table.rows();
    if rows > u32::MAX as usize / 2 {
        return Err(Error::file(path, format!("{rows} rows on one rank; use more ranks")));
    }
    if reader.labeled && table.label.len() != rows {
        return Err(Error::file(path, "the file has no labels; set data.label"));
    }
    Ok(())
}

struct Local {
    table: Table,
    /// For each chunk: words of its categorical features.
    words: Vec<BTreeMap<usize, Vec<Vec<u8>>>>,
}

fn read_csv(path: &Path, reader: &Reader<'_>, part: (usize, usize)) -> Result<Local> {
    let file = TextFile::open(path)?;
    let bytes = file.bytes();
    let tabs = path.extension().is_some_and(|extension| extension == "tsv");
    let layout = csv::layout(bytes, reader.schema, tabs, reader.labeled);
    let layout = layout.map_err(|problem| file.error(problem))?;
    let group = |line: &[u8]| csv::group_of(&layout, line);
    let grouped = layout.roles.roles.contains(&Role::Group);
    let group: Option<GroupOf<'_>> = grouped.then_some(&group);
    let range = part_of(bytes, layout.body..bytes.len(), part, group);
    let pieces = parse_pieces(&file, range, reader, &|range| csv::parse(bytes, range, &layout))?;
    Ok(assemble(layout.roles.features, pieces))
}

fn read_libsvm(path: &Path, reader: &Reader<'_>, part: (usize, usize)) -> Result<Local> {
    let file = TextFile::open(path)?;
    let bytes = file.bytes();
    let first = crate::data::text::lines(bytes, 0..bytes.len()).find(|(_, line)| !line.is_empty());
    let grouped = first.is_some_and(|(_, line)| libsvm::group_of(line).is_some());
    let group: Option<GroupOf<'_>> = grouped.then_some(&libsvm::group_of);
    let range = part_of(bytes, 0..bytes.len(), part, group);
    let features = reader.schema.features;
    let parse = |range: Range<usize>| libsvm::parse(bytes, range, features);
    let pieces = parse_pieces(&file, range, reader, &parse)?;
    let columns = |piece: &Piece| match &piece.values {
        Values::Sparse { starts, .. } => starts.len() - 1,
        _ => 0,
    };
    let columns = pieces.iter().map(columns).max().unwrap_or(0);
    if let Some(most) = reader.schema.features.filter(|most| columns > *most) {
        let what = format!("index {} exceeds data.features = {most}", columns - 1);
        return Err(Error::file(path, what));
    }
    let local = assemble(Table::numbered(columns), pieces);
    let (rows, table) = (local.table.rows(), &local.table);
    for (name, count) in [
        ("weight", table.weight.as_ref().map_or(0, Vec::len)),
        ("qid", table.group.as_ref().map_or(0, Vec::len)),
    ] {
        if count != 0 && count != rows {
            return Err(Error::file(path, format!("some lines have a {name} and some do not")));
        }
    }
    Ok(local)
}

/// Parses pieces of a range on all threads, in order. The first problem of the file is reported.
fn parse_pieces(
    file: &TextFile,
    range: Range<usize>,
    reader: &Reader<'_>,
    parse: &(dyn Fn(Range<usize>) -> std::result::Result<Piece, Problem> + Sync),
) -> Result<Vec<Piece>> {
    let bytes = file.bytes();
    // The whole file, because other ranks may share the memory.
    let spill = match reader.spill.filter(|spill| bytes.len() as u64 > spill.above) {
        Some(spill) => Some(Spill::create(spill.folder)?),
        None => None,
    };
    let mut cuts = vec![range.start];
    while *cuts.last().expect("not empty") < range.end {
        let last = *cuts.last().expect("not empty");
        cuts.push(
            line_start(bytes, last + PIECE_BYTES.min(range.end - last), range.start).min(range.end),
        );
    }
    let offsets = par::map(reader.team, cuts.len() - 1, &|index| {
        let mut piece =
            parse(cuts[index]..cuts[index + 1]).map_err(|problem| file.error(problem))?;
        let mut offset = None;
        if let (Some(spill), Values::Columns { store, .. }) = (&spill, &mut piece.values) {
            let at = spill.append(store.values()).map_err(Error::system("spill", &file.path))?;
            *store = Store::Memory(Vec::new());
            offset = Some(at);
        }
        Ok::<_, Error>((std::sync::Mutex::new(Some(piece)), offset))
    });
    let mut pieces = Vec::new();
    let mut places = Vec::new();
    for parsed in offsets {
        let (piece, offset) = parsed?;
        pieces.extend(piece.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()));
        places.push(offset);
    }
    if let Some(map) =
        spill.map(Spill::map).transpose().map_err(Error::system("map", &file.path))?.flatten()
    {
        for (piece, offset) in pieces.iter_mut().zip(places) {
            if let (Values::Columns { store, .. }, Some(offset)) = (&mut piece.values, offset) {
                *store = Store::Mapped(Arc::clone(&map), offset);
            }
        }
    }
    Ok(pieces)
}

fn assemble(names: Vec<String>, pieces: Vec<Piece>) -> Local {
    let mut table = Table { categories: vec![None; names.len()], names, ..Table::default() };
    let (mut words, mut weight, mut group) = (Vec::new(), Vec::new(), Vec::new());
    for piece in pieces {
        table.label.extend(piece.label);
        weight.extend(piece.weight);
        group.extend(piece.group);
        table.chunks.push(Chunk::new(piece.rows, piece.values));
        words.push(piece.words);
    }
    table.weight = (!weight.is_empty()).then_some(weight);
    table.group = (!group.is_empty()).then_some(group);
    Local { table, words }
}

#[cfg(feature = "parquet")]
fn read_parquet(path: &Path, reader: &Reader<'_>, part: (usize, usize)) -> Result<Local> {
    let (names, pieces) = crate::data::parquet::read(path, reader, part)?;
    Ok(assemble(names, pieces))
}

#[cfg(not(feature = "parquet"))]
fn read_parquet(path: &Path, _: &Reader<'_>, _: (usize, usize)) -> Result<Local> {
    let what = "parquet files need the cargo feature `parquet`; build with --features parquet";
    Err(Error::file(path, what))
}

#[cfg(feature = "arrow")]
fn read_arrow(path: &Path, reader: &Reader<'_>, part: (usize, usize)) -> Result<Local> {
    let (names, pieces) = crate::data::arrow::read(path, reader, part)?;
    Ok(assemble(names, pieces))
}

#[cfg(not(feature = "arrow"))]
fn read_arrow(path: &Path, _: &Reader<'_>, _: (usize, usize)) -> Result<Local> {
    let what = "Arrow files need the cargo feature `arrow`; build with --features arrow";
    Err(Error::file(path, what))
}

/// Reads an array. Labels, weights and groups are columns `fN` of it, or other `.npy` files next to it.
fn read_npy(path: &Path, reader: &Reader<'_>, part: (usize, usize)) -> Result<Local> {
    let array = Array::open(path)?;
    let schema = reader.schema;
    let is_file = |name: &&String| name.ends_with(".npy");
    let side = |name: &Option<String>, role: &str| -> Result<Option<Array>> {
        let Some(name) = name.as_ref().filter(is_file) else { return Ok(None) };
        let beside = path.parent().unwrap_or(Path::new("")).join(name);
        let array = Array::open(&beside)?;
        if array.rows * array.columns != self_rows(path)? {
            let what = format!(
                "{role} has {} values for {} rows",
                array.rows * array.columns,
                self_rows(path)?
            );
            return Err(Error::file(&beside, what));
        }
        Ok(Some(array))
    };
    let label = if reader.labeled { side(&schema.label, "data.label")? } else { None };
    let weight = if reader.labeled { side(&schema.weight, "data.weight")? } else { None };
    let group = if reader.labeled { side(&schema.group, "data.group")? } else { None };
    let columns_only = Schema {
        label: schema.label.clone().filter(|name| !is_file(&name)),
        weight: schema.weight.clone().filter(|name| !is_file(&name)),
        group: schema.group.clone().filter(|name| !is_file(&name)),
        ..schema.clone()
    };
    let names = Table::numbered(array.columns);
    let labeled = reader.labeled && label.is_none();
    let roles =
        columns_only.assign(&names, labeled).map_err(|(_, what)| Error::file(path, what))?;
    let column_of = |role: Role| roles.roles.iter().position(|other| *other == role);
    let pick = |side: &Option<Array>, role: Role, row: usize| match (side, column_of(role)) {
        (Some(side), _) if side.columns == 1 => Some(side.get(row, 0)),
        (Some(side), _) => Some(side.get(row / side.columns, row % side.columns)),
        (None, Some(column)) => Some(array.get(row, column)),
        (None, None) => None,
    };
    let id = |row: usize| pick(&group, Role::Group, row).map(f32::to_bits);
    let cut = |part: usize, parts: usize| {
        let mut row = (array.rows as u128 * part as u128 / parts as u128) as usize;
        while row > 0 && row < array.rows && id(row).is_some() && id(row) == id(row - 1) {
            row += 1;
        }
        row
    };
    let rows = cut(part.0, part.1)..cut(part.0 + 1, part.1);
    let mut table = Table {
        categories: vec![None; roles.features.len()],
        names: roles.features.clone(),
        ..Table::default()
    };
    let (mut weights, mut groups) = (Vec::new(), Vec::new());
    for row in rows.clone() {
        let wrong = |what: String| Error::File {
            path: path.to_path_buf(),
            what: format!("row {}: {what}", row + 1),
        };
        if let Some(value) = pick(&label, Role::Label, row) {
            if !value.is_finite() {
                return Err(wrong(format!("the label {value} is not finite")));
            }
            table.label.push(value);
        }
        if let Some(value) = pick(&weight, Role::Weight, row) {
            if !value.is_finite() || value < 0.0 {
                return Err(wrong(format!(
                    "the weight {value} is not a finite number of at least 0"
                )));
            }
            weights.push(value);
        }
        groups.extend(id(row).map(|bits| group_id(&bits.to_le_bytes())));
    }
    table.weight = (!weights.is_empty()).then_some(weights);
    table.group = (!groups.is_empty()).then_some(groups);
    let plain = roles.features.len() == array.columns;
    let values = match array.mapped().filter(|_| plain) {
        Some((map, start)) => Values::Rows {
            store: Store::Mapped(map, start),
            stride: array.columns,
            first: rows.start * array.columns,
        },
        None => {
            let columns = (0..array.columns).filter(|column| {
                matches!(roles.roles[*column], Role::Feature(_) | Role::Category(_))
            });
            let columns: Vec<usize> = columns.collect();
            let values =
                columns.iter().flat_map(|column| rows.clone().map(|row| array.get(row, *column)));
            Values::Columns { store: Store::Memory(values.collect()), first: 0 }
        }
    };
    table.chunks.push(Chunk::new(rows.len(), values));
    Ok(Local { table, words: vec![BTreeMap::new()] })
}

fn self_rows(path: &Path) -> Result<usize> {
    Ok(Array::open(path)?.rows)
}
