//! The directories of an overlay, from `/proc/self/mountinfo`.
//!
//! ```text
//!   36 27 0:31 / /merged rw - overlay overlay rw,lowerdir=/lower2:/lower1,upperdir=/upper,workdir=/work
//!              └ root  └ mount point                      └ upper first, then these, decide what /merged shows
//! ```
//!
//! Known flaw: the paths are those of the process that mounted it. In a container they may not exist, or name
//! another file, so the caller has to compare the file it finds.

/// The directories that may contain a file of mount `id`, which is `path` as the process sees it: uppermost first,
/// with the path inside appended.
pub fn candidates(mountinfo: &str, id: u64, path: &str) -> Vec<String> {
    let line = mountinfo.lines().find(|l| l.split(' ').next().and_then(|n| n.parse().ok()) == Some(id));
    line.and_then(|line| parse_line(line, path)).unwrap_or_default()
}

fn parse_line(line: &str, path: &str) -> Option<Vec<String>> {
    let (mount, super_block) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(3);
    let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
    let mut fields = super_block.split(' ');
    if fields.next()? != "overlay" {
        return None;
    }
    let options = unescape(fields.nth(1)?);
    let inside = path.strip_prefix(point.trim_end_matches('/')).filter(|p| p.is_empty() || p.starts_with('/'))?;
    let inside = format!("{}{inside}", root.trim_end_matches('/'));
    let mut uppers = Vec::new();
    let mut lowers = Vec::new();
    for option in split(&options, ',') {
        match option.split_once('=') {
            Some(("upperdir", dir)) => uppers.push(dir.replace('\\', "")),
            Some(("lowerdir" | "lowerdir+", dirs)) => lowers.extend(split(dirs, ':').map(|d| d.replace('\\', ""))),
            _ => {}
        }
    }
    uppers.extend(lowers);
    Some(uppers.into_iter().filter(|d| d.starts_with('/')).map(|dir| format!("{dir}{inside}")).collect())
}

/// Parts between separators that no backslash precedes.
fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let mut escaped = false;
    text.split(move |c| {
        let separators = c == separator && !escaped;
        escaped = c == '\\' && !escaped;
        separators
    })
}

/// Blanks are written as `\040` there, and backslashes as `\134`.
fn unescape(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out += before;
        match after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(u8::is_ascii) {
            Some(byte) => {
                out.push(byte.into());
                rest = &after[3..];
            }
            None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
        36 27 0:31 / /mer\\040ged rw shared:1 - overlay overlay rw,lowerdir=/low\\134:2:/low1,upperdir=/up,workdir=/w\n\
        37 27 0:31 /sub /elsewhere rw - overlay overlay rw,lowerdir=rel:/low1\n";

    #[test]
    fn upper_directory_precedes_lowers() {
        assert_eq!(candidates(INFO, 36, "/mer ged/a/b"), ["/up/a/b", "/low:2/a/b", "/low1/a/b"]);
        assert_eq!(candidates(INFO, 37, "/elsewhere/f"), ["/low1/sub/f"]);
    }

    #[test]
    fn other_mounts_have_no_candidates() {
        assert!(candidates(INFO, 27, "/etc/passwd").is_empty());
        assert!(candidates(INFO, 36, "/mer gedness").is_empty());
        assert!(candidates(INFO, 99, "/x").is_empty());
        assert!(candidates("36 - ", 36, "/x").is_empty());
        assert!(candidates("é", 36, "\\\\").is_empty());
    }
}
