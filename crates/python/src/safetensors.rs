//! The header of a safetensors file, which is untrusted.
//!
//! ```text
//!   8 bytes   N, little endian
//!   N bytes   { "__metadata__": { name: text }, tensor: { "dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24] } }
//!   the rest  the tensors' bytes, counted from 0
//! ```
//!
//! A header is untrusted input and decides which bytes become which tensor. So all of it is checked before a byte of
//! data is read: its own length, that every name occurs once, that every type is known, that the size of every shape
//! can be computed and equals that of its bytes, and that the bytes are inside the file, without overlap and without a
//! gap. The last two are rules of the format: without them one file could have two meanings, or hidden contents.
//!
//! No I/O and no Python here: the callers, and the fuzzer, pass the bytes.

use std::collections::HashSet;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, Visitor};

/// The longest header that is accepted: the limit of the format's own library.
pub(crate) const MAX_HEADER: u64 = 100_000_000;

/// Bytes of the length before the header.
pub(crate) const LENGTH_PREFIX: u64 = 8;

/// Types of elements: name and bits.
const DTYPES: [(&str, u64); 22] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// One tensor of a file; its bytes are `begin..end` after the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

/// A valid header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The free-form metadata, if any.
    pub(crate) metadata: Option<Vec<(String, String)>>,
    /// In the order of their bytes.
    pub(crate) tensors: Vec<Tensor>,
}

/// Why a header is rejected, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeaderError(String);

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for HeaderError {}

fn header_error<T>(why: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError(why.into()))
}

/// The length of the header, from the first 8 bytes of a file of `file` bytes.
pub(crate) fn header_len(prefix: &[u8], file: u64) -> Result<u64, HeaderError> {
    let Some(Ok(prefix)) = prefix.get(..LENGTH_PREFIX as usize).map(<[u8; LENGTH_PREFIX as usize]>::try_from) else {
        return header_error(format!("the file has {file} bytes, too few for the length of a header"));
    };
    let len = u64::from_le_bytes(prefix);
    if len > MAX_HEADER {
        return header_error(format!("it claims a header of {len} bytes; the most is {MAX_HEADER}"));
    }
    if len > file.saturating_sub(LENGTH_PREFIX) {
        return header_error(format!("it claims a header of {len} bytes, but the file has {file}"));
    }
    if len < 2 {
        return header_error(format!("a header of {len} bytes is none"));
    }
    Ok(len)
}

/// Parses the header; `data` is the number of bytes after it.
pub(crate) fn parse(text: &[u8], data: u64) -> Result<Header, HeaderError> {
    if text.first() != Some(&b'{') {
        return header_error("the header does not begin with {");
    }
    let mut json = serde_json::Deserializer::from_slice(text);
    let mut header = match json.deserialize_map(HeaderVisitor).and_then(|header| json.end().map(|()| header)) {
        Ok(header) => header,
        Err(e) => return header_error(format!("the header is no such JSON: {e}")),
    };
    // Tensors of no bytes precede the one that begins at the same byte.
    header.tensors.sort_by_key(|t| (t.begin, t.end));
    let mut end = 0;
    for tensor in &header.tensors {
        if tensor.begin != end {
            let what = if tensor.begin < end { "overlap the tensor before" } else { "leave a gap before them" };
            return header_error(format!("the bytes of {:?}, {}..{}, {what}", tensor.name, tensor.begin, tensor.end));
        }
        end = tensor.end;
    }
    if end != data {
        return header_error(format!("its tensors end after {end} bytes of data, but the file has {data}"));
    }
    Ok(header)
}

/// The bytes of this many elements; `None` if that is no whole number below 2^63.
fn bytes(shape: &[u64], bits: u64) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |n, &length| n.checked_mul(length))?;
    let bits = elements.checked_mul(bits)?;
    (bits % 8 == 0).then_some(bits / 8).filter(|&n| i64::try_from(n).is_ok())
}

/// The whole header.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut seen = HashSet::new();
        let mut header = Header { metadata: None, tensors: Vec::new() };
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(de::Error::custom(format_args!("{name:?} occurs twice")));
            }
            if name == "__metadata__" {
                header.metadata = map.next_value_seed(MetadataVisitor)?;
            } else {
                header.tensors.push(map.next_value_seed(TensorVisitor(name))?);
            }
        }
        Ok(header)
    }
}

/// The free-form metadata: an object of strings, or null.
struct MetadataVisitor;

impl<'de> DeserializeSeed<'de> for MetadataVisitor {
    type Value = Option<Vec<(String, String)>>;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataVisitor {
    type Value = Option<Vec<(String, String)>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut seen = HashSet::new();
        let mut texts = Vec::new();
        while let Some((name, text)) = map.next_entry::<String, String>()? {
            if !seen.insert(name.clone()) {
                return Err(de::Error::custom(format_args!("{name:?} occurs twice in __metadata__")));
            }
            texts.push((name, text));
        }
        Ok(Some(texts))
    }
}

/// The entry of the tensor of this name.
struct TensorVisitor(String);

impl<'de> DeserializeSeed<'de> for TensorVisitor {
    type Value = Tensor;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Tensor, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TensorVisitor {
    type Value = Tensor;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the dtype, shape and data_offsets of {:?}", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tensor, A::Error> {
        let name = self.0;
        let fail = |why: String| Err(de::Error::custom(format_args!("tensor {name:?}: {why}")));
        let (mut dtype, mut shape, mut offsets) = (None::<String>, None::<Vec<u64>>, None::<(u64, u64)>);
        while let Some(key) = map.next_key::<String>()? {
            let twice = match key.as_str() {
                "dtype" => dtype.replace(map.next_value()?).is_some(),
                "shape" => shape.replace(map.next_value()?).is_some(),
                "data_offsets" => offsets.replace(map.next_value()?).is_some(),
                // Keys of later versions of the format.
                _ => map.next_value::<IgnoredAny>().map(|_| false)?,
            };
            if twice {
                return fail(format!("{key:?} occurs twice"));
            }
        }
        let (Some(dtype), Some(shape), Some((begin, end))) = (dtype, shape, offsets) else {
            return fail("it needs dtype, shape and data_offsets".into());
        };
        let Some(&(dtype, bits)) = DTYPES.iter().find(|(known, _)| *known == dtype) else {
            return fail(format!("its dtype {dtype:?} is unknown"));
        };
        if shape.iter().any(|&length| i64::try_from(length).is_err()) {
            return fail(format!("its shape {shape:?} cannot be"));
        }
        let Some(bytes) = bytes(&shape, bits) else {
            return fail(format!("a shape of {shape:?} with dtype {dtype} is no whole number of bytes"));
        };
        if begin.checked_add(bytes) != Some(end) {
            return fail(format!("shape {shape:?} with dtype {dtype} takes {bytes} bytes, not {begin}..{end}"));
        }
        Ok(Tensor { name, dtype, shape, begin, end })
    }
}
