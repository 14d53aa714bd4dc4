//! Whether all processes give a lock the same number of slots, by what the files of its slots say.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::config::{SemaphoreConfig, SemaphoreOptions};
use super::error::{SemaphoreError, SemaphoreResult};
use super::status::LockDetails;
use super::Semaphore;
use crate::os::text::digits;

/// The maximum number of slots of a lock that `sema` uses.
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
        let written = slot.written_record().and_then(|record| record.slot_count);
        if written.is_none_or(|written| written == count) {
            continue;
        }
        // The lock may be stale, which takes longer to find out.
        let holder = holder_of(&slot)?.filter(|holder| !holder.is_stale);
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
/// and at least as many as are needed for the slots in use. A stale slot, perhaps of a larger pool,
/// counts only if all are stale. `None` if no slot is in use.
pub(crate) fn slot_count_in_use(path: &Path, config: &SemaphoreConfig) -> Option<u32> {
    let options = SemaphoreOptions::new();
    let first = Semaphore::with_options(path_of(path, 0), config.clone(), options);
    let slots = all_slots(&first.ok()?);
    let counts = slots.iter().filter_map(|slot| {
        let holder = holder_of(slot).ok()?.filter(|it| it.pid.is_some())?;
        let (_, number) = split_slot(slot.lock_path.name.as_bytes())?;
        let counts = [holder.slot_count, number.checked_add(1)];
        // Any user can write any number.
        let valid = |count: &u32| (1..=MAX_SLOT_COUNT).contains(count);
        let count = counts.into_iter().flatten().filter(valid).max()?;
        Some((!holder.is_stale, count))
    });
    counts.max().map(|(_, count)| count)
}

/// What is known of the holder of a slot; `None` if there is none, or if the file belongs to
/// another program.
fn holder_of(slot: &Semaphore) -> SemaphoreResult<Option<LockDetails>> {
    match slot.look() {
        Err(SemaphoreError::NotALockFile(_)) => Ok(None),
        busy => Ok(busy?.map(|busy| busy.details)),
    }
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
