//! Reusable storage for a value of any type.

use std::any::Any;

/// Holds one value of any type, such as the activations that a block saves for its backward pass. The allocation is
/// reused as long as the type stays the same, so a steady training step allocates nothing.
#[derive(Default)]
pub struct Slot(Option<Box<dyn Any + Send>>); // Box<Option<T>>

impl Slot {
    /// Stores a value and drops the previous one.
    pub fn put<T: Send + 'static>(&mut self, value: T) {
        match self.cell() {
            Some(cell) => *cell = Some(value),
            None => self.0 = Some(Box::new(Some(value))),
        }
    }

    /// Takes the stored value out.
    ///
    /// # Panics
    /// If the slot does not hold a `T`.
    pub fn take<T: Send + 'static>(&mut self) -> T {
        let value = self.cell::<T>().and_then(Option::take);
        value.unwrap_or_else(|| panic!("the slot holds no {}", std::any::type_name::<T>()))
    }

    /// The stored value, which `make` creates if the slot does not hold a `T`.
    pub fn get_or_insert_with<T: Send + 'static>(&mut self, make: impl FnOnce() -> T) -> &mut T {
        if self.cell::<T>().is_none_or(|cell| cell.is_none()) {
            self.put(make());
        }
        self.cell().and_then(Option::as_mut).expect("a value was just stored")
    }

    /// The stored value, if the slot holds a `T`.
    pub fn get_mut<T: Send + 'static>(&mut self) -> Option<&mut T> {
        self.cell().and_then(Option::as_mut)
    }

    /// Drops the stored value.
    pub fn clear(&mut self) {
        self.0 = None;
    }

    fn cell<T: Send + 'static>(&mut self) -> Option<&mut Option<T>> {
        self.0.as_mut()?.downcast_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_holds_one_value_of_any_type() {
        let mut slot = Slot::default();
        slot.put(3_u32);
        slot.put(4_u32);
        assert_eq!(slot.take::<u32>(), 4);
        slot.put("text");
        assert_eq!(*slot.get_or_insert_with(|| "other"), "text");
        assert_eq!(*slot.get_or_insert_with(|| 7_u64), 7);
    }

    #[test]
    #[should_panic(expected = "the slot holds no u32")]
    fn taking_twice_is_an_error() {
        let mut slot = Slot::default();
        slot.put(1_u32);
        slot.take::<u32>();
        slot.take::<u32>();
    }
}
