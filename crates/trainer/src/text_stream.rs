//! Incremental detokenization. A character may take several tokens, and the text of a token may depend on the token
//! before it. Text that was returned never changes.

/// Tokens so far, and how many of them have been returned as text.
pub(crate) struct TextStream {
    ids: Vec<u32>,
    /// First token to decode. Includes the tokens returned last: some tokenizers write a space before a token only if
    /// another token precedes it.
    from: usize,
    returned: usize,
}

/// UTF-8 characters have at most 4 bytes, hence at most 4 tokens. Text that is invalid after that stays invalid.
const MAX_TOKENS_PER_CHAR: usize = 4;

impl TextStream {
    /// A stream that starts after the prompt `ids`.
    pub fn after(ids: Vec<u32>) -> TextStream {
        TextStream { from: 0, returned: ids.len(), ids }
    }

    /// Adds a token and returns the complete characters; empty if the last one is incomplete.
    pub fn push<E>(
        &mut self,
        id: u32,
        decode: impl Fn(&[u32]) -> Result<String, E>,
    ) -> Result<String, E> {
        self.ids.push(id);
        let pending = self.ids.len() - self.returned;
        let text = self.rest(decode)?;
        if text.ends_with('\u{fffd}') && pending < MAX_TOKENS_PER_CHAR {
            return Ok(String::new());
        }
        (self.from, self.returned) = (self.returned, self.ids.len());
        Ok(text)
    }

    /// Text of the tokens that have not been returned: an incomplete character, or nothing.
    pub fn rest<E>(&self, decode: impl Fn(&[u32]) -> Result<String, E>) -> Result<String, E> {
        let before = decode(&self.ids[self.from..self.returned])?;
        let text = decode(&self.ids[self.from..])?;
        Ok(text.strip_prefix(&before).unwrap_or_default().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    type Decoded = Result<String, Infallible>;

    fn bytes(ids: &[u32]) -> Decoded {
        let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Decodes like SentencePiece: each word starts with a space, which is dropped at the start of the text.
    fn words(ids: &[u32]) -> Decoded {
        const WORDS: [&str; 4] = ["▁the", "▁cat", "s", "▁sleep"];
        let text: String = ids.iter().map(|&id| WORDS[id as usize]).collect();
        let text = text.replace('▁', " ");
        Ok(text.strip_prefix(' ').unwrap_or(&text).into())
    }

    fn pieces(prompt: &[u32], ids: &[u32], decode: fn(&[u32]) -> Decoded) -> Vec<String> {
        let mut stream = TextStream::after(prompt.to_vec());
        let mut pieces: Vec<String> =
            ids.iter().map(|&id| stream.push(id, decode).unwrap_or_else(|e| match e {})).collect();
        pieces.push(stream.rest(decode).unwrap_or_else(|e| match e {}));
        pieces
    }

    #[test]
    fn spaces_between_words_are_kept() {
        assert_eq!(pieces(&[], &[0, 1, 2, 3], words), ["the", " cat", "s", " sleep", ""]);
        assert_eq!(pieces(&[0], &[1, 2, 3, 3], words), [" cat", "s", " sleep", " sleep", ""]);
        assert_eq!(pieces(&[0, 1], &[2], words), ["s", ""]);
    }

    #[test]
    fn characters_are_returned_when_complete() {
        let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
        assert_eq!(pieces(&[], &ids("aé😀b"), bytes), ["a", "", "é", "", "", "", "😀", "b", ""]);
        for text in ["", "plain", "né à Gráz", "日本語 😀😀", "�"] {
            for prompt in ["", "x", "né"] {
                assert_eq!(pieces(&ids(prompt), &ids(text), bytes).concat(), text);
            }
        }
    }

    #[test]
    fn invalid_utf8_is_returned_as_replacement_characters() {
        // An incomplete character, within the text and at its end.
        assert_eq!(pieces(&[], &[0xf0, 0x9f, 0x61], bytes).concat(), "\u{fffd}a");
        assert_eq!(pieces(&[], &[0x61, 0xf0, 0x9f], bytes), ["a", "", "", "\u{fffd}"]);
        assert_eq!(pieces(&[], &[0xff; 6], bytes).concat(), "\u{fffd}".repeat(6));
    }
}
