//! Runs that survive: the real binary, with ranks, launchers and hosts that die, stop, come back, or differ.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use lockstep_ckpt::Tensors;

/// Long enough to be struck in the middle, quick enough to be waited for.
const RUN: &str = r#"
name = "run"
[model]
preset = "gpt2-test"
[train]
steps = 240
global_batch = 8
micro_batch = 1
lr = 1e-2
schedule = "constant"
warmup = 2
threads = 1
log_every = 1
[checkpoint]
every = 10
keep = 2
"#;

/// A folder of its own for a test, and the program in it.
struct Desk(PathBuf);

impl Desk {
    fn new(name: &str) -> Desk {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("recovery-{name}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("the target folder can be written");
        fs::write(dir.join("run.toml"), RUN).expect("the target folder can be written");
        Desk(dir)
    }

    fn command(&self, words: &str) -> Command {
        self.program(env!("CARGO_BIN_EXE_lockstep"), words)
    }

    fn program(&self, program: &str, words: &str) -> Command {
        let mut command = Command::new(program);
        command.args(words.split_whitespace()).current_dir(&self.0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts a training without waiting for it. What it says goes to a file, so that nobody has to read along.
    fn start(&self, words: &str, log: &str) -> Running {
        let file = fs::File::create(self.0.join(log)).expect("the test's folder");
        let mut command = self.command(words);
        command.stdout(file.try_clone().expect("a file")).stderr(file);
        Running { child: command.spawn().expect("the binary runs"), log: self.0.join(log) }
    }

    #[track_caller]
    fn done(&self, words: &str) -> String {
        let ran = finished(self.command(words).output());
        assert_eq!(ran.code, Some(0), "{words}:\n{}", ran.said);
        ran.said
    }

    /// The last step that a run has reported.
    fn step(&self, run: &str) -> usize {
        let text = fs::read_to_string(self.0.join(run).join("metrics.jsonl")).unwrap_or_default();
        let mut steps = text.lines().filter_map(|line| {
            serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64()
        });
        steps.next_back().unwrap_or(0) as usize
    }

    #[track_caller]
    fn until_step(&self, run: &str, step: usize) {
        eventually(&format!("step {step} of {run}"), || self.step(run) >= step);
    }

    /// Every step was reported once, and none left out.
    #[track_caller]
    fn reported_once(&self, run: &str, steps: usize) {
        let reports =
            lockstep_events::read(&self.0.join(run).join("metrics.jsonl")).expect("lines");
        let told: Vec<usize> =
            reports.iter().filter(|line| line.loss.is_some()).map(|line| line.step).collect();
        assert_eq!(told, (1..=steps).collect::<Vec<_>>(), "{run}");
    }

    /// The parameters of a run's newest checkpoint.
    fn weights(&self, run: &str) -> Vec<(String, Vec<f32>)> {
        let newest = lockstep_ckpt::find(&self.0.join(run)).expect("a checkpoint");
        let checkpoint = lockstep_ckpt::load(&newest).expect("a checkpoint");
        let params = checkpoint.params();
        let read = |named: &lockstep_ckpt::Named| {
            let mut values = vec![0.0; named.len()];
            params.read(&named.name, &mut values).expect("whole files");
            (named.name.clone(), values)
        };
        params.list().iter().map(read).collect()
    }
}

struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The ranks that it has started, in their order.
    fn ranks(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid());
        let text = fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }

    #[track_caller]
    fn ends(mut self, code: i32) -> String {
        let status = self.child.wait().expect("the launcher is ours");
        let said = self.said();
        assert_eq!(status.code(), Some(code), "{status}:\n{said}");
        said
    }
}

impl Drop for Running {
    /// A test that failed leaves nobody behind; ranks die with their launcher.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Ran {
    code: Option<i32>,
    said: String,
}

fn finished(output: std::io::Result<Output>) -> Ran {
    let Output { status, stdout, stderr } = output.expect("the binary runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ran { code: status.code(), said: text(&stdout) + &text(&stderr) }
}

/// Trains on a disk of its own that is filled once a checkpoint is there, and emptied when a save has failed. What
/// it prints goes to that disk too.
const ON_A_FULL_DISK: &str = r#"
mkdir -p disk && mount -t tmpfs -o size=2m none disk || exit 77
cd disk
"$LOCKSTEP" train ../run.toml --ranks 2 > printed 2> ../told &
run=$!
until [ -e runs/run/checkpoints/step-00000010 ] || ! kill -0 $run; do sleep 0.02; done
cat /dev/zero > ballast 2> /dev/null
until grep -q 'was not saved' ../told || ! kill -0 $run; do sleep 0.02; done
rm ballast
wait $run
code=$?
cp -r runs ..
exit $code
"#;

/// Waits for something that is about to be true; the limit only keeps a broken test from hanging.
#[track_caller]
fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !check() {
        assert!(Instant::now() < limit, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: kill takes no memory; the process is one that this test has started and not yet waited for, or a
    // child of one.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0, "signalling {pid}");
}

#[track_caller]
fn same_bits(desk: &Desk, one: &str, other: &str) {
    for ((name, one), (_, other)) in desk.weights(one).iter().zip(&desk.weights(other)) {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(one), bits(other), "{name}");
    }
}

#[test]
fn a_killed_rank_costs_nothing_but_time() {
    let desk = Desk::new("killed");
    for layout in ["data=2", "data=2 --set layout.zero=3", "tensor=2"] {
        let words = format!("train run.toml --ranks 2 --set layout.{layout}");
        desk.done(&format!("{words} --set name=whole"));
        let running = desk.start(&format!("{words} --set name=struck"), "log");
        for (rank, step) in [(1, 25), (0, 60)] {
            desk.until_step("runs/struck", step);
            let ranks = running.ranks();
            assert_eq!(ranks.len(), 2, "{ranks:?}: {}", running.said());
            signal(ranks[rank], libc::SIGKILL);
            eventually("others in their place", || {
                let now = running.ranks();
                now.len() == 2 && now.iter().all(|pid| !ranks.contains(pid))
            });
        }
        let said = running.ends(0);
        assert!(said.contains("rank 1 failed first: it was killed by SIGKILL"), "{said}");
        // Both times there was a checkpoint since, so both were the first restart.
        assert_eq!(said.matches("restart 1 of at most 3").count(), 2, "{said}");
        same_bits(&desk, "runs/struck", "runs/whole");
        desk.reported_once("runs/struck", 240);
        for run in ["runs/whole", "runs/struck"] {
            fs::remove_dir_all(desk.0.join(run)).expect("a run");
        }
    }
}

#[test]
fn a_killed_launcher_is_started_again_by_the_same_command() {
    let desk = Desk::new("launcher");
    desk.done("train run.toml --ranks 2 --set name=whole");
    let words = "train run.toml --ranks 2 --resume=if-any";
    for step in [25, 70] {
        let running = desk.start(words, "log");
        desk.until_step("runs/run", step);
        let ranks = running.ranks();
        signal(running.pid(), libc::SIGKILL);
        drop(running);
        eventually("ranks that die with their launcher", || {
            ranks.iter().all(|pid| !Path::new(&format!("/proc/{pid}/exe")).exists())
        });
    }
    desk.start(words, "log").ends(0);
    same_bits(&desk, "runs/run", "runs/whole");
    desk.reported_once("runs/run", 240);
    // What is done is not done again.
    let said = desk.done(words);
    assert!(!said.contains("saved"), "{said}");
}

#[test]
fn a_signal_saves_and_the_run_goes_on_later() {
    let desk = Desk::new("signals");
    desk.done("train run.toml --ranks 2 --set name=whole");
    // No checkpoint is due before the end: what is there was saved because of the signal.
    let words = "train run.toml --ranks 2 --resume=if-any --set checkpoint.every=0";
    for (number, step) in [(libc::SIGTERM, 30), (libc::SIGINT, 80)] {
        let running = desk.start(words, "log");
        desk.until_step("runs/run", step);
        signal(running.pid(), number);
        let said = running.ends(75);
        assert!(said.contains("as asked; --resume goes on"), "{said}");
        assert!(desk.step("runs/run") < 240, "it was not done");
    }
    // A rank that is signalled by somebody else stops them all.
    let running = desk.start(words, "log");
    desk.until_step("runs/run", 130);
    signal(running.ranks()[1], libc::SIGTERM);
    running.ends(75);
    desk.start(words, "log").ends(0);
    same_bits(&desk, "runs/run", "runs/whole");
    desk.reported_once("runs/run", 240);
}

/// A launcher and its ranks that are held, as on a host that hangs, while another takes the run over.
#[test]
fn who_comes_back_from_the_dead_is_refused() {
    let desk = Desk::new("undead");
    desk.done("train run.toml --ranks 2 --set name=whole");
    let words = "train run.toml --ranks 2 --resume=if-any";
    let old = desk.start(words, "old");
    desk.until_step("runs/run", 25);
    let all = [vec![old.pid()], old.ranks()].concat();
    all.iter().for_each(|pid| signal(*pid, libc::SIGSTOP));
    let new = desk.start(words, "new");
    eventually("ranks in their place", || {
        new.said().contains("step 2") || new.said().contains("step 3")
    });
    all.iter().for_each(|pid| signal(*pid, libc::SIGCONT));
    let said = old.ends(1);
    assert!(said.contains("generation 1") && said.contains("generation 2"), "{said}");
    new.ends(0);
    same_bits(&desk, "runs/run", "runs/whole");
    desk.reported_once("runs/run", 240);
}

#[test]
fn without_the_time_to_save_a_signal_has_another_code() {
    let desk = Desk::new("grace");
    let running = desk.start("train run.toml --ranks 2 --grace 0", "log");
    desk.until_step("runs/run", 5);
    // A rank that has stopped cannot save.
    signal(running.ranks()[1], libc::SIGSTOP);
    signal(running.pid(), libc::SIGTERM);
    running.ends(143);
}

#[test]
fn one_rank_is_started_again_too() {
    let desk = Desk::new("alone");
    desk.done("train run.toml --set name=whole");
    let running = desk.start("train run.toml", "log");
    desk.until_step("runs/run", 25);
    signal(running.ranks()[0], libc::SIGKILL);
    running.ends(0);
    same_bits(&desk, "runs/run", "runs/whole");
}

#[test]
fn what_fails_again_and_again_ends() {
    let desk = Desk::new("again");
    // No rank gets as far as a checkpoint.
    let program = env!("CARGO_BIN_EXE_lockstep");
    let words = "train run.toml --ranks 2 --max-restarts 1 --set checkpoint.every=0";
    let running = desk.start(words, "log");
    desk.until_step("runs/run", 3);
    let first = running.ranks();
    signal(first[0], libc::SIGKILL);
    let mut second = vec![];
    eventually("others in their place", || {
        second = running.ranks();
        second.len() == 2 && second.iter().all(|pid| !first.contains(pid))
    });
    signal(second[0], libc::SIGKILL);
    let said = running.ends(137);
    assert!(said.contains("giving up after 1 restart without a new checkpoint"), "{said}");
    // A mistake is not tried twice.
    let wrong = "train run.toml --ranks 2 --set name=wrong --set train.lr=1e30 --set train.clip=0 --set train.warmup=0";
    let ran = finished(desk.program(program, wrong).output());
    assert_eq!(ran.code, Some(1), "{}", ran.said);
    assert!(ran.said.contains("not restarting: the error is permanent"), "{}", ran.said);
    assert!(!ran.said.contains("restarting ("), "{}", ran.said);
}

/// Two ranks by `lockstep launch`, each with a command of its own.
fn two_ranks(desk: &Desk, script: &str) -> Ran {
    let mut command = desk.command("launch --nproc-per-node 2 --tee -- sh -c");
    finished(command.arg(script).output())
}

#[test]
fn ranks_that_differ_are_named_before_the_first_step() {
    let desk = Desk::new("differ");
    let program = env!("CARGO_BIN_EXE_lockstep");
    let other = desk.0.join("other");
    let mut bytes = fs::read(program).expect("the program");
    bytes.push(0);
    fs::write(&other, bytes).expect("the test's folder");
    fs::set_permissions(&other, fs::metadata(program).expect("the program").permissions())
        .expect("the test's folder");
    let other = other.display();
    for (script, hints) in [
        (
            format!("exec {program} train run.toml --set train.lr=0.0$((RANK+1))"),
            ["rank 1 (on ", "runs with another train.lr.min than rank 0", ": 0.02 / 0.01"],
        ),
        (
            format!("[ $RANK = 0 ] && exec {program} train run.toml; exec {other} train run.toml"),
            ["rank 1 (on ", "runs another program than rank 0", ": blake3 "],
        ),
    ] {
        let ran = two_ranks(&desk, &script);
        assert_eq!(ran.code, Some(78), "{}", ran.said);
        for hint in hints {
            // By both of them.
            for rank in ["[0] ", "[1] "] {
                let told = |line: &str| line.starts_with(rank) && line.contains(hint);
                assert!(ran.said.lines().any(told), "no {hint:?} by {rank}in:\n{}", ran.said);
            }
        }
        assert!(!desk.0.join("runs/run/metrics.jsonl").exists(), "no step was taken");
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its number").port()
}

#[test]
fn hosts_that_go_and_come_back_change_the_ranks_and_not_the_training() {
    let desk = Desk::new("hosts");
    fs::write(desk.0.join("token"), "0123456789abcdef".repeat(4)).expect("the test's folder");
    // With small steps, so that rounding stays rounding.
    let longer =
        "--set layout.data=4 --set train.steps=1500 --set train.lr=1e-3 --set checkpoint.every=20";
    desk.done(&format!("train run.toml {longer} --set name=whole"));
    let port = free_port();
    let node = |number: usize| {
        let words = format!(
            "train run.toml {longer} --nnodes 2 --node-rank {number} --master-addr 127.0.0.1 \
             --master-port {port} --token-file token --min-ranks 2 --max-ranks 4 --wait 1"
        );
        desk.start(&words, &format!("log-{number}"))
    };
    let (first, second) = (node(0), node(1));
    desk.until_step("runs/run", 25);
    assert_eq!((first.ranks().len(), second.ranks().len()), (2, 2));
    // A host is lost, and the other goes on.
    signal(second.pid(), libc::SIGKILL);
    drop(second);
    eventually("two ranks", || first.said().contains("continuing with 2 of 4 ranks"));
    let before = desk.step("runs/run");
    desk.until_step("runs/run", before.min(1490) + 3);
    // It comes back, and takes part again.
    let second = node(1);
    eventually("four ranks", || second.ranks().len() == 2);
    let said = first.ends(0);
    second.ends(0);
    assert!(said.contains("lost node 1 ("), "{said}");
    assert!(said.contains("4 ranks are available: stopping 2 ranks to continue with 4"), "{said}");
    desk.reported_once("runs/run", 1500);
    // Over all parameters together: some, such as the keys' biases, move by nothing but rounding.
    let (run, whole) = (desk.weights("runs/run"), desk.weights("runs/whole"));
    let (mut apart, mut size) = (0.0, 0.0);
    for ((name, one), (other_name, other)) in run.iter().zip(&whole) {
        assert_eq!((name, one.len()), (other_name, other.len()));
        apart += one.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        size += other.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
    }
    let apart = (apart / size).sqrt();
    assert!(apart <= 1e-3, "{apart}");
    assert!(apart > 0.0, "other sums were taken: it was another layout for a while");
}

#[test]
fn a_full_disk_costs_a_save_and_not_the_run() {
    let desk = Desk::new("full");
    let script = |script| {
        let mut command = desk.program("unshare", "--map-root-user --mount sh -c");
        finished(command.arg(script).env("LOCKSTEP", env!("CARGO_BIN_EXE_lockstep")).output())
    };
    if script("mkdir -p disk && mount -t tmpfs none disk").code != Some(0) {
        eprintln!("skipped: no disk of its own can be mounted here");
        return;
    }
    let ran = script(ON_A_FULL_DISK);
    let told = fs::read_to_string(desk.0.join("told")).expect("it was started");
    assert_eq!(ran.code, Some(0), "{}{told}", ran.said);
    assert!(told.contains("was not saved") && told.contains("No space left on device"), "{told}");
    // What was reported while there was room is whole.
    let reports = lockstep_events::read(&desk.0.join("runs/run/metrics.jsonl")).expect("lines");
    assert_eq!(reports.last().map(|line| line.step), Some(240));
    desk.done("train run.toml --ranks 2 --set name=whole");
    same_bits(&desk, "runs/run", "runs/whole");
    // Neither does anybody have to hear of it.
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
    let mut unheard = desk.command("train run.toml --ranks 2 --set name=unheard");
    let status = unheard.stdout(full()).stderr(full()).status().expect("the binary runs");
    assert!(status.success(), "{status}");
}
