//! Extracts one field of a JSON object. The other fields are skipped, not built.

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::fmt;

/// The string in a field of the object, or the reason why there is none.
pub fn field_of(object: &str, field: &str) -> Result<String, String> {
    let mut json = serde_json::Deserializer::from_str(object);
    let found = Pick(field).deserialize(&mut json).and_then(|found| json.end().map(|()| found));
    found.map_err(|error| match error.is_data() {
        // Serde appends a position; the caller reports a better one.
        true => error.to_string().split(" at line").next().unwrap_or_default().to_string(),
        false => format!("not JSON, at column {}", error.column()),
    })
}

struct Pick<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Pick<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<String, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Pick<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the field \"{}\"", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<String, A::Error> {
        use serde::de::Error;
        let mut found = None;
        let mut others = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == self.0 {
                found = Some(map.next_value::<String>()?);
            } else {
                map.next_value::<IgnoredAny>()?;
                others.push(name);
            }
        }
        found.ok_or_else(|| {
            A::Error::custom(format!("no field \"{}\"; fields are: {}", self.0, others.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::field_of;

    #[test]
    fn field_is_found_at_any_position() {
        for object in [
            r#"{"text": "a\nb é"}"#,
            r#" {"id": 7, "meta": {"text": "no"}, "text": "a\nb \u00e9"} "#,
            r#"{"text": "a\nb é", "more": [1, {"text": null}]}"#,
        ] {
            assert_eq!(field_of(object, "text").unwrap(), "a\nb é");
        }
    }

    #[test]
    fn missing_or_invalid_field_is_reported() {
        for (object, reason) in [
            (r#"{"body": "x", "id": 1}"#, "no field \"text\"; fields are: body, id"),
            (r#"{"text": null}"#, "null"),
            (r#"{"text": 5}"#, "integer `5`, expected a string"),
            (r#"["text"]"#, "expected an object with the field \"text\""),
            (r#"{"text": "x"#, "not JSON, at column 11"),
            (r#"{"text": "x"} more"#, "not JSON, at column"),
            ("", "not JSON"),
        ] {
            let error = field_of(object, "text").unwrap_err();
            assert!(error.contains(reason), "{object}: {error}");
        }
    }
}
