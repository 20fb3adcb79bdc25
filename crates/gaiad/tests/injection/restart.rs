pub(crate) fn role() {}
