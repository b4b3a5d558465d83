//! Tokens become text as they come: a character may take several tokens, and how a token is written may depend
//! on the one before it. Never takes back what it has told.

/// Tokens so far, and how much of them has been told as text.
pub(crate) struct TextStream {
    ids: Vec<u32>,
    /// Tokens from here on are decoded, together with those that are new. What was told last is among them: some
    /// tokenizers write a space before a token only where another one stands in front of it.
    from: usize,
    told: usize,
}

/// No character is longer than four bytes, so no more tokens than that; what is still broken then stays so.
const LONGEST: usize = 4;

impl TextStream {
    /// What follows `ids`, which are not told.
    pub fn after(ids: Vec<u32>) -> TextStream {
        TextStream { from: 0, told: ids.len(), ids }
    }

    /// What can be told now that this token has come.
    pub fn hear<E>(
        &mut self,
        id: u32,
        decode: impl Fn(&[u32]) -> Result<String, E>,
    ) -> Result<String, E> {
        self.ids.push(id);
        let waiting = self.ids.len() - self.told;
        let text = self.untold(decode)?;
        if text.ends_with('\u{fffd}') && waiting < LONGEST {
            return Ok(String::new());
        }
        (self.from, self.told) = (self.told, self.ids.len());
        Ok(text)
    }

    /// What was heard and not told: the beginning of a character, or nothing.
    pub fn untold<E>(&self, decode: impl Fn(&[u32]) -> Result<String, E>) -> Result<String, E> {
        let before = decode(&self.ids[self.from..self.told])?;
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

    /// As SentencePiece writes them: each word brings the space before it, and the first one's is left out.
    fn words(ids: &[u32]) -> Decoded {
        const WORDS: [&str; 4] = ["▁the", "▁cat", "s", "▁sleep"];
        let text: String = ids.iter().map(|&id| WORDS[id as usize]).collect();
        let text = text.replace('▁', " ");
        Ok(text.strip_prefix(' ').unwrap_or(&text).into())
    }

    fn pieces(prompt: &[u32], ids: &[u32], decode: fn(&[u32]) -> Decoded) -> Vec<String> {
        let mut spoken = TextStream::after(prompt.to_vec());
        let mut pieces: Vec<String> =
            ids.iter().map(|&id| spoken.hear(id, decode).unwrap_or_else(|e| match e {})).collect();
        pieces.push(spoken.untold(decode).unwrap_or_else(|e| match e {}));
        pieces
    }

    #[test]
    fn spaces_between_words_are_told() {
        assert_eq!(pieces(&[], &[0, 1, 2, 3], words), ["the", " cat", "s", " sleep", ""]);
        assert_eq!(pieces(&[0], &[1, 2, 3, 3], words), [" cat", "s", " sleep", " sleep", ""]);
        assert_eq!(pieces(&[0, 1], &[2], words), ["s", ""]);
    }

    #[test]
    fn characters_are_told_when_they_are_whole() {
        let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
        assert_eq!(pieces(&[], &ids("aé😀b"), bytes), ["a", "", "é", "", "", "", "😀", "b", ""]);
        for text in ["", "plain", "né à Gráz", "日本語 😀😀", "�"] {
            for prompt in ["", "x", "né"] {
                assert_eq!(pieces(&ids(prompt), &ids(text), bytes).concat(), text);
            }
        }
    }

    #[test]
    fn what_is_no_character_is_told_all_the_same() {
        // A character that breaks off, within the text and at its end.
        assert_eq!(pieces(&[], &[0xf0, 0x9f, 0x61], bytes).concat(), "\u{fffd}a");
        assert_eq!(pieces(&[], &[0x61, 0xf0, 0x9f], bytes), ["a", "", "", "\u{fffd}"]);
        assert_eq!(pieces(&[], &[0xff; 6], bytes).concat(), "\u{fffd}".repeat(6));
    }
}
