//! `lockstep launch`: the real binary, with shell scripts as ranks.

mod launcher;
mod program;
mod signals;

use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use launcher::{
    LaunchResult, eventually, free_port, launch, launch_in, launch_program, pids, read, signal,
    wait_until_gone,
};

#[test]
fn ranks_of_two_nodes_get_their_identity() {
    let script = r#"echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $GROUP_RANK \
$MASTER_ADDR:$MASTER_PORT $LOCKSTEP_GENERATION $LOCKSTEP_TOKEN ${LOCKSTEP_TOKEN_FILE:-nofile} \
${LOCKSTEP_LISTEN_FD:+fd} $LOCKSTEP_BIND" > seen-$RANK"#;
    let token = "0123456789abcdef".repeat(4);
    let port = free_port();
    let mut dir = PathBuf::new();
    for node in 0..2 {
        let options = format!(
            "--nnodes 2 --nproc-per-node 3 --node-rank {node} --master-port {port} --bind 127.0.0.1"
        );
        let launch = match node {
            0 => launch("two-nodes", &options, script).env("LOCKSTEP_TOKEN", &token),
            _ => {
                let path = dir.join("token");
                fs::write(&path, format!("{token}\n")).expect("the test's directory is writable");
                fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("our own file");
                let options = format!("{options} --token-file token");
                launch_in(&dir, &options, &["sh", "-c", script])
            }
        };
        // Variables of a launcher around this one are replaced.
        let ran = launch.env("RANK", "9").env("LOCKSTEP_LISTEN_FD", "77").run();
        ran.assert_exits(0);
        assert!(!ran.err.contains(&token));
        dir = ran.dir;
    }
    for rank in 0..6 {
        let fd = if rank == 0 { "fd" } else { "" };
        let (local, node) = (rank % 3, rank / 3);
        assert_eq!(
            read(&dir.join(format!("seen-{rank}"))).trim_end(),
            format!(
                "{rank}/6 {local}/3 {node} {node} 127.0.0.1:{port} 0 {token} nofile {fd} 127.0.0.1"
            )
        );
    }
}

#[test]
fn only_rank_0_inherits_the_listening_socket() {
    let script = r#"
        if [ $RANK = 0 ]; then
            readlink /proc/$$/fd/$LOCKSTEP_LISTEN_FD > socket.new; mv socket.new socket
            until [ -e connected ]; do sleep 0.05; done
        else
            until [ -e socket ]; do sleep 0.05; done
            ls -l /proc/$$/fd > open-in-1
            bash -c 'exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT' || exit 9
            touch connected
        fi"#;
    let ran = launch("listener", "--nproc-per-node 2", script).run();
    ran.assert_exits(0);
    let socket = ran.file("socket");
    assert!(socket.starts_with("socket:["), "{socket}");
    assert!(!ran.file("open-in-1").contains(socket.trim()));
}

#[test]
fn the_first_failure_is_reported_with_its_last_lines() {
    let script = r#"
        [ $RANK = 1 ] || exec sleep 1000
        for i in $(seq 30); do echo "line $i."; done
        echo oops >&2
        exit 7"#;
    let ran = launch("first", "--nproc-per-node 3 --log-dir logs", script).run();
    ran.assert_exits(7);
    ran.assert_prints("rank 1 failed first: it exited with code 7 (generation 0); logs/rank-1.log ends with:\n  | line 12.");
    ran.assert_prints("line 30.\n");
    ran.assert_prints("| oops\n");
    assert!(!ran.err.contains("line 11."), "{}", ran.err);
}

#[test]
fn a_killed_rank_is_reported_with_its_signal() {
    for (name, code) in [("SEGV", 139), ("KILL", 137)] {
        let script = format!("[ $RANK = 1 ] || exec sleep 1000; kill -{name} $$");
        let ran = launch(&format!("killed-{name}"), "--nproc-per-node 2", &script).run();
        ran.assert_exits(code);
        ran.assert_prints(&format!("rank 1 failed first: it was killed by SIG{name}"));
        // Memory is blamed only if the kernel says so.
        let counts =
            fs::read_to_string("/proc/vmstat").is_ok_and(|all| all.contains("oom_kill 0\n"));
        assert!(!counts || !ran.err.contains("memory ran out"), "{}", ran.err);
    }
}

#[test]
fn ranks_that_ignore_sigterm_or_are_stopped_are_killed() {
    let script = r#"
        echo $$ > pid-$RANK
        case $RANK in
        0) trap '' TERM; touch ignoring; while :; do sleep 0.1; done;;
        1) kill -STOP $$; sleep 1000;;
        *) until [ -e ignoring ] && grep -q '^State:.*T' /proc/$(cat pid-1)/status; do sleep 0.05; done
           exit 3;;
        esac"#;
    let ran = launch("stubborn", "--nproc-per-node 3 --grace 1", script).run();
    ran.assert_exits(3);
    wait_until_gone(&pids(&ran.dir, 3));
}

#[test]
fn restarts_count_generations_with_new_tokens() {
    let script = r#"
        echo "$LOCKSTEP_GENERATION $LOCKSTEP_TOKEN" >> seen-$RANK
        echo "this is $LOCKSTEP_GENERATION"
        # A rank that fails stops the other, so both wait until the other is done.
        until grep -qs "^$LOCKSTEP_GENERATION " seen-$((1 - RANK)); do sleep 0.05; done
        [ $LOCKSTEP_GENERATION = 2 ] || exit 4"#;
    for (restarts, code, generations) in [(0, 4, 1), (1, 4, 2), (2, 0, 3), (5, 0, 3)] {
        let options = format!("--nproc-per-node 2 --max-restarts {restarts} --log-dir logs");
        let ran = launch(&format!("restart-{restarts}"), &options, script).run();
        ran.assert_exits(code);
        let (mine, other) = (ran.file("seen-0"), ran.file("seen-1"));
        assert_eq!(mine, other, "ranks share a token");
        let mut tokens: Vec<&str> = Vec::new();
        for (generation, line) in mine.lines().enumerate() {
            let (number, token) = line.split_once(' ').expect("two words");
            assert_eq!(number, generation.to_string());
            assert_eq!(token.len(), 64);
            assert!(!tokens.contains(&token), "a token is used twice");
            assert!(!ran.err.contains(token) && !ran.out.contains(token));
            tokens.push(token);
        }
        assert_eq!(tokens.len(), generations);
        let log: String = (0..generations)
            .map(|number| format!("--- generation {number} ---\nthis is {number}\n"))
            .collect();
        assert_eq!(ran.file("logs/rank-1.log"), log);
    }
}

#[test]
fn ranks_die_with_a_killed_launcher() {
    let script = "mkfifo f-$RANK; trap '' TERM HUP INT; echo $$ > pid-$RANK; read x < f-$RANK";
    // The shell waits without starting a program, which would not be killed with it.
    let (dir, mut child) = launch("orphans", "--nproc-per-node 3", script).start();
    let ranks = pids(&dir, 3);
    child.kill().expect("the launcher is a child");
    child.wait().expect("the launcher is a child");
    wait_until_gone(&ranks);
}

#[test]
fn a_signalled_launcher_stops_its_ranks_first() {
    for (number, code) in [(libc::SIGTERM, 143), (libc::SIGINT, 130)] {
        let script = r#"
            trap 'touch stopped-$RANK; exit 0' TERM
            echo $$ > pid-$RANK
            while :; do sleep 0.05; done"#;
        // A signal does not cause a restart.
        let options = "--nproc-per-node 2 --max-restarts 3 --grace 600";
        let (dir, child) = launch(&format!("signalled-{number}"), options, script).start();
        let ranks = pids(&dir, 2);
        signal(child.id(), number);
        let output = child.wait_with_output().expect("the launcher is a child");
        LaunchResult::new(dir.clone(), output).assert_exits(code);
        wait_until_gone(&ranks);
        assert!(dir.join("stopped-0").exists() && dir.join("stopped-1").exists());
    }
}

#[test]
fn a_hangup_is_ignored_under_nohup() {
    let script = "echo $$ > pid-$RANK; while :; do sleep 0.05; done";
    let mut launch = launch("nohup", "", script);
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"trap '' HUP; exec "$0" "$@""#]);
    shell.arg(launch.command.get_program());
    shell.args(launch.command.get_args()).current_dir(&launch.dir);
    shell.stdout(Stdio::piped()).stderr(Stdio::piped());
    launch.command = shell;
    let (dir, child) = launch.start();
    let ranks = pids(&dir, 1);
    // If the first were not ignored, it would be handled first.
    signal(child.id(), libc::SIGHUP);
    signal(child.id(), libc::SIGTERM);
    let output = child.wait_with_output().expect("the launcher is a child");
    LaunchResult::new(dir, output).assert_exits(143);
    wait_until_gone(&ranks);
}

#[test]
fn a_second_signal_ends_the_grace_period() {
    let script = "trap '' TERM; echo $$ > pid-$RANK; while :; do sleep 0.05; done";
    let options = "--nproc-per-node 2 --grace 80000";
    let (dir, mut child) = launch("twice", options, script).start();
    let ranks = pids(&dir, 2);
    signal(child.id(), libc::SIGTERM);
    // Pending signals are delivered in any order, and those of the same kind are merged.
    eventually("the launcher exits", || {
        signal(child.id(), libc::SIGINT);
        child.try_wait().expect("the launcher is a child").is_some()
    });
    let output = child.wait_with_output().expect("the launcher is a child");
    wait_until_gone(&ranks);
    assert!(matches!(output.status.code(), Some(143 | 130)));
}

#[test]
fn descendants_of_ranks_are_killed() {
    for (name, end, code) in [("success", "exit 0", 0), ("failure", "exit 5", 5)] {
        let script = format!(
            "(trap '' TERM; exec sleep 1000) & echo $! > pid.new-$RANK; mv pid.new-$RANK pid-$RANK
            until [ -e pid-0 ] && [ -e pid-1 ]; do sleep 0.05; done
            [ $RANK = 0 ] && {end}; exit 0"
        );
        let ran = launch(&format!("grandchildren-{name}"), "--nproc-per-node 2", &script).run();
        ran.assert_exits(code);
        wait_until_gone(&pids(&ran.dir, 2));
    }
}

const TALK: &str = r#"printf "out $RANK "; echo end; echo "err $RANK" >&2; printf "no newline""#;

#[test]
fn rank_0_is_shown_unchanged_and_all_ranks_are_logged() {
    let ran = launch("shown", "--nproc-per-node 2 --log-dir a/b", TALK).run();
    ran.assert_exits(0);
    assert_eq!(ran.out, "out 0 end\nno newline");
    assert_eq!(ran.err, "err 0\n");
    for rank in 0..2 {
        let log = ran.file(&format!("a/b/rank-{rank}.log"));
        let mut lines: Vec<&str> = log.lines().collect();
        lines.sort();
        let (out, err) = (format!("out {rank} end"), format!("err {rank}"));
        assert_eq!(lines, ["--- generation 0 ---", &err, "no newline", &out]);
    }
}

#[test]
fn default_log_directory() {
    let ran = launch("default-logs", "", "echo here").run();
    let runs = fs::read_dir(ran.dir.join("runs")).expect("the runs directory");
    let run = runs.flatten().next().expect("one run").path();
    assert!(run.file_name().is_some_and(|name| name.to_string_lossy().starts_with("launch-")));
    assert_eq!(read(&run.join("logs/rank-0.log")), "--- generation 0 ---\nhere\n");
}

#[test]
fn tee_shows_whole_lines_with_their_rank() {
    let script = r#"
        for i in $(seq 200); do printf "part one of $i, "; printf "part two\n"; done
        echo "err $RANK" >&2; printf "no newline""#;
    let ran = launch("tee", "--nproc-per-node 3 --tee", script).run();
    ran.assert_exits(0);
    for rank in 0..3 {
        let prefix = format!("[{rank}] ");
        let mine: Vec<&str> =
            ran.out.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let mut expected: Vec<String> =
            (1..=200).map(|i| format!("part one of {i}, part two")).collect();
        expected.push("no newline".to_string());
        assert_eq!(mine, expected);
        assert!(ran.err.contains(&format!("[{rank}] err {rank}\n")), "{}", ran.err);
    }
    assert_eq!(ran.out.lines().count(), 3 * 201);
}

#[test]
fn a_port_in_use_is_reported_before_any_rank_starts() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("its number").port();
    let ran = launch("port", &format!("--master-port {port}"), "touch started").run();
    ran.assert_exits(1);
    ran.assert_prints(&format!("port {port} is in use on 127.0.0.1; choose another --master-port"));
    assert!(!ran.dir.join("started").exists());
}

#[test]
fn errors_suggest_a_fix() {
    let short = "abc";
    for (name, options, token, parts) in [
        (
            "token",
            "--nnodes 2",
            "",
            &["2 nodes need a shared token", "openssl rand -hex 32 > FILE"][..],
        ),
        ("short", "--nnodes 2", short, &["LOCKSTEP_TOKEN is not 64 hex digits (it has 3"][..]),
        ("file", "--token-file none", "", &["cannot read the token file none"][..]),
        (
            "many",
            "--nnodes 2 --node-rank 2 --nproc-per-node 0 --grace 18446744073709551615",
            "",
            &[
                "the number of ranks per node must be at least 1 (got 0)",
                "node rank 2 is out of range: there are 2 nodes",
                "need a shared token",
            ][..],
        ),
    ] {
        let launch = launch(&format!("errors-{name}"), options, "touch started");
        let ran = launch.env("LOCKSTEP_TOKEN", token).run();
        ran.assert_exits(1);
        parts.iter().for_each(|part| ran.assert_prints(part));
        assert!(!ran.dir.join("started").exists());
    }
}

#[test]
fn a_missing_command_is_reported() {
    let options = "--nproc-per-node 2";
    let ran = launch_program("missing-command", options, &["no-such-program"]).run();
    ran.assert_exits(1);
    ran.assert_prints("error: cannot start no-such-program as rank 0: No such file");
}

#[test]
fn ranks_start_without_blocked_signals() {
    // Not through a shell, which would clear its signal mask.
    let program = ["grep", "SigBlk", "/proc/self/status"];
    let ran = launch_program("mask", "", &program).run();
    ran.assert_exits(0);
    assert_eq!(ran.out, "SigBlk:\t0000000000000000\n");
}

#[test]
fn kubeflow_variables_set_the_options() {
    let ran = launch(
        "kubeflow",
        "",
        "echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT > seen-$LOCAL_RANK",
    )
    .env("PET_NNODES", "2")
    .env("PET_NODE_RANK", "1")
    .env("PET_NPROC_PER_NODE", "2")
    .env("PET_MASTER_ADDR", "job-master-0")
    .env("PET_MASTER_PORT", "23456")
    .env("LOCKSTEP_TOKEN", &"ab".repeat(32))
    .run();
    ran.assert_exits(0);
    for local in 0..2 {
        let seen = ran.file(&format!("seen-{local}"));
        assert_eq!(seen, format!("{} of 4 at job-master-0:23456\n", 2 + local));
    }
}

/// Runs the self-test of two nodes on this host, each with its own folder of runs. Returns the exit codes and the report.
fn selftest_of_two_nodes(name: &str, folders: [&str; 2]) -> ([Option<i32>; 2], serde_json::Value) {
    let dir = std::env::temp_dir().join(format!("lockstep-{name}-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("the temporary directory is writable");
    let token = "0123456789abcdef".repeat(4);
    let port = free_port();
    let start = |node: usize| {
        program::lockstep()
            .args(["launch", "--selftest", "--json", "--storage-mib", "1", "--nnodes", "2"])
            .args(["--nproc-per-node", "2", "--master-addr", "127.0.0.1"])
            .args(["--node-rank", &node.to_string(), "--master-port", &port.to_string()])
            .args(["--runs", folders[node]])
            .args(["--log-dir", &format!("logs-{node}")])
            .env("LOCKSTEP_TOKEN", &token)
            .current_dir(&dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    };
    let started = [0, 1].map(start);
    let ended = started.map(|child| child.wait_with_output().expect("the launcher ends"));
    let text = String::from_utf8_lossy(&ended[0].stdout).into_owned();
    let report = text.lines().find(|line| line.starts_with('{')).unwrap_or_else(|| {
        panic!("no report: {text}{}", String::from_utf8_lossy(&ended[0].stderr))
    });
    let report = serde_json::from_str(report).expect("the report is JSON");
    fs::remove_dir_all(&dir).expect("our own directory");
    (ended.map(|ended| ended.status.code()), report)
}

/// The status of a check of a host. The speeds of this machine are not judged.
fn check_of(report: &serde_json::Value, host: usize, name: &str) -> String {
    let checks = report["hosts"][host]["checks"].as_array().expect("a list of checks");
    let check = checks.iter().find(|check| check["name"] == name);
    check.unwrap_or_else(|| panic!("no check {name}: {report}"))["status"].as_str().unwrap().into()
}

#[test]
fn selftest_finds_two_healthy_nodes() {
    let (codes, report) = selftest_of_two_nodes("selftest", ["runs", "runs"]);
    for host in 0..2 {
        for name in ["versions", "devices", "all-reduce", "clock", "shared folder"] {
            assert_eq!(check_of(&report, host, name), "ok", "{name}: {report}");
        }
        assert_eq!(report["hosts"][host]["ranks"], 2);
        check_of(&report, host, "link inside the host");
        check_of(&report, host, "link between hosts");
        check_of(&report, host, "storage");
    }
    let failed = i32::from(report["verdict"] == "failed");
    assert_eq!(codes, [Some(failed); 2], "{report}");
}

#[test]
fn selftest_names_a_node_without_the_shared_folder() {
    let (codes, report) = selftest_of_two_nodes("selftest-bad", ["runs", "elsewhere"]);
    assert!(codes.iter().all(|code| *code != Some(0)), "{codes:?}");
    assert_eq!(check_of(&report, 0, "shared folder"), "ok");
    assert_eq!(check_of(&report, 1, "shared folder"), "failed");
    assert_eq!(
        (&report["verdict"], &report["hosts"][1]["verdict"]),
        (&"failed".into(), &"failed".into())
    );
}
