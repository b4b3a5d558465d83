//! The server, over real connections.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Duration;

use lockstep_dash::serve::{ServeOptions, serve};
use serde_json::Value;

use crate::fake_run::FakeRun;

/// Starts a server that lives as long as the test process.
fn start(runs: PathBuf, token: Option<&str>) -> SocketAddr {
    let (sender, address) = channel();
    let token = token.map(str::to_string);
    std::thread::spawn(move || {
        let options = ServeOptions { runs: vec![runs], address: ([127, 0, 0, 1], 0).into(), token };
        serve(options, |address| sender.send(address).unwrap()).unwrap();
    });
    address.recv().unwrap()
}

/// Status and body of a request.
fn request(server: SocketAddr, method: &str, path: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(server).unwrap();
    let text =
        format!("{method} {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("content-security-policy") || status >= 400, "{head}");
    (status, body.to_string())
}

fn get(server: SocketAddr, path: &str) -> (u16, String) {
    request(server, "GET", path, "")
}

fn json(server: SocketAddr, path: &str) -> Value {
    let (status, body) = get(server, path);
    assert_eq!(status, 200, "{path}: {body}");
    // Chunked bodies have a length line before the text.
    let start = body.find(['[', '{', 'n']).unwrap();
    let end = body.rfind([']', '}', 'l']).unwrap();
    serde_json::from_str(&body[start..=end])
        .unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
}

#[test]
fn every_answer_of_a_run() {
    let mut run = FakeRun::new("server", 2, &["layout.data=2"]);
    run.steps = 50;
    run.write().fail(1, "was killed by SIGKILL", &["<script>alert(1)</script>", "the last line"]);
    let server = start(run.path.clone(), None);
    let name = run.path.file_name().unwrap().to_str().unwrap();
    let runs = json(server, "/api/runs");
    assert_eq!(
        (&runs[0]["name"], &runs[0]["state"], &runs[0]["step"]),
        (&name.into(), &"failed".into(), &50.0.into())
    );
    let metrics = json(server, &format!("/api/run/metrics?run={name}&points=4"));
    assert_eq!(metrics["total"], 5);
    assert_eq!(metrics["train"]["step"].as_array().unwrap().last().unwrap(), 50.0);
    let about = json(server, &format!("/api/run?run={name}"));
    assert_eq!(about["mesh"]["ranks"].as_array().unwrap().len(), 2);
    assert_eq!(about["failures"][0]["rank"], 1);
    let logs = json(server, &format!("/api/run/logs?run={name}"));
    assert_eq!((&logs["rank"], &logs["first_failing"]), (&1.into(), &1.into()));
    assert_eq!(logs["lines"].as_array().unwrap().last().unwrap(), "the last line");
    let found = json(server, &format!("/api/run/logs?run={name}&rank=1&search=script"));
    assert_eq!(found["lines"].as_array().unwrap().len(), 1);
    assert_eq!(json(server, &format!("/api/run/doctor?run={name}"))["problem"]["rank"], 1);
    assert_eq!(json(server, &format!("/api/run/plan?run={name}"))["plan"]["ranks"], 2);
    assert_eq!(json(server, &format!("/api/run/timeline?run={name}")), Value::Null);
    let (_, text) = get(server, "/metrics");
    assert!(text.contains(&format!("lockstep_step{{run=\"{name}\"}} 50")), "{text}");
    assert!(text.trim_end().ends_with("# EOF") || text.contains("# EOF\n"), "{text}");
    for asset in ["/", "/assets/app.js", "/assets/app.css", "/assets/uplot.js", "/assets/uplot.css"]
    {
        let (status, body) = get(server, asset);
        assert_eq!(status, 200);
        assert!(!body.contains("https://cdn") && !body.contains("src=\"http"), "{asset}");
    }
}

#[test]
fn hostile_requests_have_no_effect() {
    let run = FakeRun::new("hostile", 1, &[]);
    run.write();
    let server = start(run.path.clone(), None);
    let name = run.path.file_name().unwrap().to_str().unwrap();
    for path in [
        "/api/run?run=../../etc",
        "/api/run?run=%2e%2e%2f%2e%2e%2fetc",
        "/api/run/logs?run=%3Cscript%3E",
        "/api/run/plan?run=",
        "/api/run/metrics?run=nothing",
        "/assets/../Cargo.toml",
    ] {
        assert_eq!(get(server, path).0, 404, "{path}");
    }
    // Only the page itself may ask for a timeline, and only by POST.
    let trace = format!("/api/run/trace?run={name}&steps=2");
    assert_eq!(get(server, &trace).0, 405);
    assert_eq!(request(server, "POST", &trace, "").0, 403);
    assert!(!run.path.join("trace/request").exists());
    assert_eq!(request(server, "POST", &trace, "x-lockstep: 1\r\n").0, 200);
    assert_eq!(std::fs::read_to_string(run.path.join("trace/request")).unwrap(), "2");
}

#[test]
fn the_token_is_required() {
    let run = FakeRun::new("token", 1, &[]);
    let server = start(run.write().path.clone(), Some("secret"));
    assert_eq!(get(server, "/api/runs").0, 401);
    assert_eq!(get(server, "/api/runs?token=wrong").0, 401);
    assert_eq!(get(server, "/api/runs?token=secret").0, 200);
    let options = ServeOptions { runs: vec![], address: ([0, 0, 0, 0], 0).into(), token: None };
    assert!(serve(options, |_| {}).is_err(), "other addresses need a token");
}

#[test]
fn changes_and_deletions_are_pushed() {
    let mut run = FakeRun::new("live", 1, &[]);
    run.steps = 20;
    let server = start(run.write().path.clone(), None);
    let mut stream = TcpStream::connect(server).unwrap();
    let text = format!("GET /api/events HTTP/1.1\r\nHost: {server}\r\n\r\n");
    stream.write_all(text.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut seen = String::new();
    let mut wait_for = |text: &str, stream: &mut TcpStream| {
        let mut buffer = [0; 4096];
        while !seen.contains(text) {
            let count = stream.read(&mut buffer).expect("an event");
            assert!(count > 0, "the stream ended: {seen}");
            seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
    };
    wait_for("200 OK", &mut stream);
    run.steps = 30;
    run.write();
    wait_for("\"step\":30", &mut stream);
    std::fs::remove_file(run.path.join("metrics.jsonl")).unwrap();
    std::fs::remove_file(run.path.join("plan.json")).unwrap();
    wait_for("\"gone\":true", &mut stream);
}
