//! Bytes of one page, and the merge of two copies of it.

/// Bytes of a page: the unit of versions.
pub const PAGE: usize = 4096;

/// The bytes of one page.
pub type PageBytes = [u8; PAGE];

/// A page of zeros.
pub const ZEROS: PageBytes = [0; PAGE];

/// The page that contains a byte offset.
pub const fn page_of(offset: u64) -> u64 {
    offset / PAGE as u64
}

/// The byte offset of a page.
pub const fn offset_of(page: u64) -> u64 {
    page.saturating_mul(PAGE as u64)
}

/// Bytes of a page that lie in a file of this size.
pub fn bytes_inside(page: u64, size: u64) -> usize {
    size.saturating_sub(offset_of(page)).min(PAGE as u64) as usize
}

/// Copies the bytes of `copy` that differ from `base` into `head`. All three have the same length.
///
/// Words that are equal are skipped, since few bytes of a page differ as a rule.
pub fn merge(head: &mut [u8], base: &[u8], copy: &[u8]) {
    let ((head, head_rest), (base, base_rest), (copy, copy_rest)) =
        (head.as_chunks_mut::<8>(), base.as_chunks::<8>(), copy.as_chunks::<8>());
    for ((head, base), copy) in head.iter_mut().zip(base).zip(copy) {
        // As numbers: slices would be compared by a call.
        if u64::from_ne_bytes(*base) != u64::from_ne_bytes(*copy) {
            merge_bytes(head, base, copy);
        }
    }
    merge_bytes(head_rest, base_rest, copy_rest);
}

fn merge_bytes(head: &mut [u8], base: &[u8], copy: &[u8]) {
    for ((head, base), copy) in head.iter_mut().zip(base).zip(copy) {
        if base != copy {
            *head = *copy;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_keeps_bytes_of_both_writers() {
        let base = *b"0123456789";
        let mut head = *b"0A23456789";
        merge(&mut head, &base, b"012345678B");
        assert_eq!(&head, b"0A2345678B");
    }

    #[test]
    fn merge_prefers_the_copy_where_both_wrote() {
        let mut head = *b"A";
        merge(&mut head, b"0", b"B");
        assert_eq!(&head, b"B");
    }

    #[test]
    fn merge_looks_at_each_byte_of_any_length() {
        for len in 0..40 {
            let base: Vec<u8> = (0..len).collect();
            for changed in 0..usize::from(len) {
                let mut copy = base.clone();
                copy[changed] = 99;
                let (mut head, mut expected) = (vec![77; len.into()], vec![77; len.into()]);
                expected[changed] = 99;
                merge(&mut head, &base, &copy);
                assert_eq!(head, expected, "byte {changed} of {len}");
            }
        }
    }

    #[test]
    fn page_at_the_end_of_the_file_is_short() {
        assert_eq!(bytes_inside(0, 5000), 4096);
        assert_eq!(bytes_inside(1, 5000), 904);
        assert_eq!(bytes_inside(2, 5000), 0);
        assert_eq!(bytes_inside(u64::MAX, 5000), 0);
    }
}
