//! Whether all processes give a lock the same number of slots, by what the files of its slots say.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

#[cfg(feature = "programs")]
use super::config::{SemaphoreConfig, SemaphoreOptions};
use super::error::{SemaphoreError, SemaphoreResult};
use super::Semaphore;
use crate::text::digits;

/// The maximum number of slots of a lock that `sema` uses.
#[cfg(feature = "programs")]
pub(crate) const MAX_SLOT_COUNT: u32 = 1024;

/// Fails if a process that gives another number of slots holds a slot of the same lock. Does
/// nothing if the locks are not slots.
pub(super) fn agree(slots: &[Semaphore]) -> SemaphoreResult<()> {
    let Some((first, count)) = slots
        .first()
        .and_then(|it| Some((it, it.options.slot_count?)))
    else {
        return Ok(());
    };
    for slot in all_slots(first) {
        let written = slot
            .written_holder()
            .and_then(|(_, record)| record.slot_count);
        if written.is_none_or(|written| written == count) {
            continue;
        }
        // The lock may be stale, which takes longer to find out.
        let details = slot.look()?.map(|busy| busy.details);
        let holder = details.filter(|details| !details.is_stale);
        match holder.and_then(|holder| holder.slot_count) {
            Some(theirs) if theirs != count => {
                return Err(SemaphoreError::SlotCountMismatch(theirs));
            }
            _ => {}
        }
    }
    Ok(())
}

/// How many slots the lock at `path` has for the processes that hold some: what their files say,
/// and at least as many as are needed for the slots in use. `None` if none is in use.
#[cfg(feature = "programs")]
pub(crate) fn slot_count_in_use(path: &Path) -> Option<u32> {
    let config = SemaphoreConfig::default();
    let first = Semaphore::with_options(path_of(path, 0), config, SemaphoreOptions::new());
    let slots = all_slots(&first.ok()?);
    let counts = slots.iter().flat_map(|slot| {
        let record = slot.written_holder().map(|(_, record)| record);
        let number = split_slot(slot.lock_path.name.as_bytes()).map(|(_, number)| number);
        let needed = number.and_then(|number| number.checked_add(1));
        record.map_or([None; 2], |record| [record.slot_count, needed])
    });
    // Any user can write any number.
    let is_valid = |count: &u32| *count <= MAX_SLOT_COUNT;
    counts.flatten().filter(is_valid).max()
}

/// The locks of all slots that have a file, whatever number of slots its holder gives. `slot` is
/// any of the slots. Empty if this user may not list the directory.
pub(super) fn all_slots(slot: &Semaphore) -> Vec<Semaphore> {
    let place = &slot.lock_path;
    let Some((pool, _)) = split_slot(place.name.as_bytes()) else {
        return Vec::new();
    };
    let entries = fs::read_dir(&place.directory)
        .into_iter()
        .flatten()
        .flatten();
    let numbers = entries.filter_map(|entry| {
        let name = entry.file_name();
        let (its_pool, number) = split_slot(name.as_bytes())?;
        (its_pool == pool).then_some(number)
    });
    let pool = place.directory.join(OsStr::from_bytes(pool));
    let (config, options) = (&slot.config, &slot.options);
    let slots = numbers.map(|number| {
        Semaphore::with_options(path_of(&pool, number), config.clone(), options.clone())
    });
    slots.flatten().collect()
}

/// Splits the name of a slot's file into the name of the pool and the number of the slot.
fn split_slot(name: &[u8]) -> Option<(&[u8], u32)> {
    let name = name.strip_suffix(b".lock")?;
    let dot = name.iter().rposition(|byte| *byte == b'.')?;
    let number = std::str::from_utf8(&name[dot + 1..])
        .ok()
        .and_then(digits)?;
    Some((&name[..dot], number))
}

pub(super) fn path_of(path: &Path, slot: u32) -> PathBuf {
    let mut path = path.to_owned().into_os_string();
    path.push(format!(".{slot}.lock"));
    path.into()
}
