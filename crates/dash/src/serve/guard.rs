//! Who may read the page: requests to this host only, with the token if there is one. Also sets the headers that keep a
//! browser from loading or running anything that is not ours.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

pub(super) struct Access {
    token: Option<String>,
    /// Only requests to a loopback name are answered: a page of another site must not reach us under its own name.
    loopback: bool,
}

const COOKIE: &str = "lockstep_token";
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

impl Access {
    pub fn new(token: Option<String>, loopback: bool) -> Access {
        Access { token, loopback }
    }

    fn host_allowed(&self, headers: &HeaderMap) -> bool {
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("");
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        !self.loopback || matches!(name, "127.0.0.1" | "localhost" | "[::1]" | "")
    }

    /// Whether the request has the token: in the address, a header or a cookie.
    fn has_token(&self, request: &Request) -> bool {
        let Some(token) = &self.token else { return true };
        let header =
            |name| request.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let query = request.uri().query().unwrap_or("");
        let in_query = query.split('&').filter_map(|pair| pair.strip_prefix("token=")).next();
        let in_header = header(header::AUTHORIZATION).and_then(|text| text.strip_prefix("Bearer "));
        let cookies = header(header::COOKIE).unwrap_or("").split(';').map(str::trim);
        let in_cookie =
            cookies.filter_map(|cookie| cookie.strip_prefix(COOKIE)?.strip_prefix('=')).next();
        let given = [in_query, in_header, in_cookie].into_iter().flatten();
        given.into_iter().any(|given| same(given, token))
    }
}

/// Compares in a time that does not depend on where the texts differ.
fn same(a: &str, b: &str) -> bool {
    let differs = a.bytes().zip(b.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
    a.len() == b.len() && differs == 0
}

pub(super) async fn check(
    State(access): State<Arc<Access>>,
    request: Request<Body>,
    next: Next,
) -> Response {
    if !access.host_allowed(request.headers()) {
        return (StatusCode::FORBIDDEN, "this server answers only on loopback names")
            .into_response();
    }
    if !access.has_token(&request) {
        return (StatusCode::UNAUTHORIZED, "add ?token=… to the address").into_response();
    }
    let by_query = request.uri().query().unwrap_or("").contains("token=");
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    if let (Some(token), true) = (&access.token, by_query) {
        let cookie = format!("{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/");
        if let Ok(cookie) = HeaderValue::from_str(&cookie) {
            headers.insert(header::SET_COOKIE, cookie);
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_opens_the_page() {
        let access = Access::new(Some("secret".into()), false);
        let request = |uri: &str, header: Option<(&str, &str)>| {
            let mut builder = Request::builder().uri(uri);
            if let Some((name, value)) = header {
                builder = builder.header(name, value);
            }
            builder.body(Body::empty()).unwrap()
        };
        for (uri, header, allowed) in [
            ("/", None, false),
            ("/?token=secret", None, true),
            ("/?token=secre", None, false),
            ("/?token=secrets", None, false),
            ("/", Some(("authorization", "Bearer secret")), true),
            ("/", Some(("cookie", "a=b; lockstep_token=secret")), true),
            ("/", Some(("cookie", "lockstep_token=other")), false),
        ] {
            assert_eq!(access.has_token(&request(uri, header)), allowed, "{uri} {header:?}");
        }
    }

    #[test]
    fn other_host_names_are_refused_on_loopback() {
        let access = Access::new(None, true);
        for (host, allowed) in [
            ("127.0.0.1:8000", true),
            ("localhost:8000", true),
            ("[::1]:80", true),
            ("evil.example", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
            assert_eq!(access.host_allowed(&headers), allowed, "{host}");
        }
    }
}
